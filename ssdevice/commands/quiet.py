"""Silences what the frameworks print of their own accord."""

from __future__ import annotations


def quiet_frameworks() -> None:
    """Turn off the progress bars of transformers, which appear even if stderr is not a terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
