"""The decoding loop: everything a host does besides calling the contract's functions and converting
tokens to text.

It only moves integers. What decides on the next token is behind ``Conversation``.
"""

from collections.abc import Callable, Iterator, Sequence

from ssdevice.contract import Geometry
from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.generation import Reason, Run
from ssdevice.text.stream import Emission

Advance = Callable[[Conversation, int], Sequence[int]]
"""``(conversation, last) -> run``: the tokens that one target call emits after ``last``."""
Accept = Callable[[Sequence[int]], Emission]
"""``run -> Emission``: how many of its tokens count (at least one), and whether the answer ends
with them.
"""


def speculative(conversation: Conversation, last: int) -> Sequence[int]:
    """Speculative decoding: all accepted drafts and the correction."""
    return conversation.step(last)


def plain_step(conversation: Conversation, last: int) -> Sequence[int]:
    """Plain decoding through the step, whose first token does not depend on drafts."""
    return conversation.step(last)[:1]


def plain(conversation: Conversation, last: int) -> Sequence[int]:
    """Plain decoding through the T = 1 graph."""
    return (conversation.step_plain(last),)


SPECULATIVE = "speculative"
ADAPTIVE = "adaptive"
"""Speculative decoding where it pays, else plain: ``ssdevice.runtime.adaptive``, which has a memory
of its own.
"""
PLAIN_STEP = "plain_step"
MODES: dict[str, Advance] = {SPECULATIVE: speculative, "plain": plain, PLAIN_STEP: plain_step}
"""The other decoding modes by name."""


class Cancelled(InputError):
    """The answer was cancelled between two calls of prefill."""


def prefill(conversation: Conversation, prompt: Sequence[int]) -> int:
    """Commit a prompt after the tokens already committed; returns the first token of the answer.

    Raises InputError for an empty prompt, ContextOverflowError for one that does not fit,
    Cancelled.
    """
    check_prompt(conversation.geometry, prompt, conversation.length)
    size = conversation.geometry.chunk
    token = 0
    for at in range(0, len(prompt), size):
        chunk = prompt[at : at + size]
        token = conversation.prefill(chunk)
        conversation.length += len(chunk)
        if conversation.cancelled:
            raise Cancelled("the answer was cancelled")
    return token


def begin(conversation: Conversation, prompt: Sequence[int], advance: Advance) -> Sequence[int]:
    """The first tokens of the answer: prefill's, or where the host chooses, those of a call after
    the prompt's last.

    Errors are those of ``prefill``.
    """
    if conversation.chooser is None:
        return (prefill(conversation, prompt),)
    check_prompt(conversation.geometry, prompt, conversation.length)
    if len(prompt) > 1:
        prefill(conversation, prompt[:-1])
    return advance(conversation, prompt[-1])


def decode(
    conversation: Conversation,
    prompt: Sequence[int],
    advance: Advance,
    accept: Accept,
    max_tokens: int,
) -> Iterator[Run]:
    """The answer to a prompt, call by call.

    The first run is that of ``begin``; the last one has a reason. Whenever this generator is
    suspended, all emitted tokens but the last are committed; the next prefill begins with that one.
    """
    start = conversation.length + len(prompt)
    emitted = 0
    run = begin(conversation, prompt, advance)[
        : min(max_tokens, conversation.geometry.context - start + 1)
    ]
    while True:
        emission = accept(run)
        run = run[: emission.used]
        emitted += len(run)
        conversation.length = (
            start + emitted - 1
        )  # the next call overwrites the rows of tokens that do not count
        room = min(max_tokens - emitted, conversation.geometry.context - conversation.length)
        reason = Reason.STOP if emission.stopped else None
        if reason is None and room <= 0:
            reason = Reason.MAX_TOKENS if emitted >= max_tokens else Reason.CONTEXT
        yield Run(tuple(run), emission.text, reason)
        if reason is not None:
            return
        run = advance(conversation, run[-1])[:room]


def check_prompt(geometry: Geometry, prompt: Sequence[int], committed: int) -> None:
    """Raise InputError or ContextOverflowError unless ``prompt`` can follow that many committed
    tokens.
    """
    if not prompt:
        raise InputError("the prompt is empty")
    if committed + len(prompt) > geometry.context:
        before = f" after {committed} tokens of the conversation so far" if committed else ""
        room = (
            f"a context of {geometry.context}; shorten it, or export again with a larger --context"
        )
        raise ContextOverflowError(
            f"the prompt has {len(prompt)} tokens{before}, the bundle was exported for {room}"
        )
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < geometry.vocab:
            raise InputError(f"token {token} is not one of the model's {geometry.vocab}")
