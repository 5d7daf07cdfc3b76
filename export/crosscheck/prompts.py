"""Prompt ids beside those of transformers."""

from __future__ import annotations

from pathlib import Path

from ssdevice.text.tokenizer import ChatTokenizer


def compare_prompts(tokenizer: ChatTokenizer, folder: Path) -> tuple[str, ...]:
    """Raise InputError if a text has other ids than with transformers. Returns notes."""
    return ()
