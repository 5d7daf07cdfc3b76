"""The decoding loop: the whole of what a host does beside calling a target (ssdevice/contract.py).

It moves integers. Everything that decides which token comes next is behind ``Conversation``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from enum import StrEnum

from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.runtime.engine import Conversation

Advance = Callable[[Conversation, int], Sequence[int]]
"""``(conversation, root) -> run``: the tokens after ``root`` that one target call gives."""
Accept = Callable[[Sequence[int]], tuple[Sequence[int], bool]]
"""``run -> (the part of it that counts, never empty; whether the answer ends with it)``."""


class Reason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    CANCELLED = "cancelled"


def speculative(conversation: Conversation, root: int) -> Sequence[int]:
    """All that the step accepted, and its correction."""
    return conversation.step(root)


def plain_step(conversation: Conversation, root: int) -> Sequence[int]:
    """Plain decoding through the step: its first token depends on no draft."""
    return conversation.step(root)[:1]


def plain(conversation: Conversation, root: int) -> Sequence[int]:
    """Plain decoding through the T = 1 graph."""
    return (conversation.step_plain(root),)


def prefill(conversation: Conversation, prompt: Sequence[int]) -> int:
    """Commit a prompt after what is already committed; the first token of the answer.

    Raises InputError for an empty prompt, ContextOverflowError for one that does not fit.
    """
    check_prompt(conversation, prompt)
    size, root = conversation.geometry.chunk, 0
    for at in range(0, len(prompt), size):
        chunk = prompt[at : at + size]
        root = conversation.prefill(chunk)
        conversation.length += len(chunk)
    return root


def decode(
    conversation: Conversation, root: int, advance: Advance, accept: Accept, max_tokens: int
) -> Generator[Sequence[int], None, Reason]:
    """Runs of tokens after a prefill that gave ``root``, the first run; returns why the answer ended.

    Whenever this is suspended or closed, every token given out is committed but for the last, with which the next
    prefill begins.
    """
    run, stopped = accept((root,))
    yield run
    emitted = 1
    while not stopped:
        room = min(max_tokens - emitted, conversation.geometry.context - conversation.length)
        if room <= 0:
            return Reason.MAX_TOKENS if emitted >= max_tokens else Reason.CONTEXT
        run, stopped = accept(advance(conversation, run[-1])[:room])
        conversation.length += len(run)  # rows of tokens that do not count are overwritten by the next call
        emitted += len(run)
        yield run
    return Reason.STOP


def check_prompt(conversation: Conversation, prompt: Sequence[int]) -> None:
    """Raise InputError or ContextOverflowError unless ``prompt`` can follow what is committed."""
    if not prompt:
        raise InputError("the prompt is empty")
    context, vocab = conversation.geometry.context, conversation.geometry.vocab
    if conversation.length + len(prompt) > context:
        before = f" after {conversation.length} of the conversation so far" if conversation.length else ""
        raise ContextOverflowError(
            f"the prompt has {len(prompt)} tokens{before}, the bundle was exported for a context of {context}; "
            "shorten it, or export again with a larger --context"
        )
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocab:
            raise InputError(f"token {token} is not one of the model's {vocab}")
