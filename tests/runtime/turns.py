"""Answers by hand, of one conversation and of several that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def answer(conversation: Any, prompt: Sequence[int], steps: int) -> list[int]:
    return taking_turns([conversation], [prompt], steps)[0]


def taking_turns(
    conversations: Sequence[Any], prompts: Sequence[Sequence[int]], steps: int
) -> list[list[int]]:
    """The tokens of each conversation, a step of one after a step of the other."""
    answers = []
    for conversation, prompt in zip(conversations, prompts, strict=True):
        answers.append([conversation.prefill(list(prompt))])
        conversation.length = len(prompt)
    for _ in range(steps):
        for conversation, tokens in zip(conversations, answers, strict=True):
            run = conversation.step(tokens[-1])
            conversation.length += len(run)
            tokens.extend(run)
    return answers
