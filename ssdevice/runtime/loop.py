"""The decoding loop: what a host does besides calling the contract's functions and converting
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
"""``run -> Emission``: how many of a run's tokens count, at least one, and whether the answer ends
with them.
"""


def decode(
    conversation: Conversation,
    prompt: Sequence[int],
    advance: Advance,
    accept: Accept,
    max_tokens: int,
) -> Iterator[Run]:
    """The answer to a prompt, call by call.

    The first run is that of ``begin``; the last one has a reason. Whenever this generator is
    suspended, all emitted tokens but the last are committed; the next call, or the next turn's
    prefill, begins with that one.
    """
    context = conversation.geometry.context
    start = conversation.length + len(prompt)
    emitted = 0
    room = min(max_tokens, context - start + 1)
    run = begin(conversation, prompt, advance)
    while True:
        emission = accept(run[:room])
        run = run[: emission.used]
        emitted += len(run)
        # The next call overwrites the rows of tokens that do not count.
        conversation.length = start + emitted - 1
        room = min(max_tokens - emitted, context - conversation.length)
        reason = None
        if emission.stopped:
            reason = Reason.STOP
        elif emitted >= max_tokens:
            reason = Reason.MAX_TOKENS
        elif room <= 0:
            reason = Reason.CONTEXT
        yield Run(tuple(run), emission.text, reason)
        if reason is not None:
            return
        run = advance(conversation, run[-1])


def begin(conversation: Conversation, prompt: Sequence[int], advance: Advance) -> Sequence[int]:
    """The first tokens of the answer: prefill's token.

    Where the host chooses, they are those of a call after the prompt's last token. Errors are those
    of ``prefill``.
    """
    if conversation.chooser is None:
        return (prefill(conversation, prompt),)
    check_prompt(conversation.geometry, prompt, conversation.length)
    if len(prompt) > 1:
        prefill(conversation, prompt[:-1])
    return advance(conversation, prompt[-1])


def prefill(conversation: Conversation, prompt: Sequence[int]) -> int:
    """The first token of the answer to a prompt, which is committed after what already is.

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


class Cancelled(InputError):
    """The answer was cancelled between two calls of prefill."""


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
PLAIN_STEP = "plain_step"
MODES: dict[str, Advance] = {SPECULATIVE: speculative, "plain": plain, PLAIN_STEP: plain_step}
"""Decoding modes by name, all but ADAPTIVE."""
ADAPTIVE = "adaptive"
"""Speculative decoding where it pays, else plain: see ``ssdevice.runtime.adaptive``."""


def check_prompt(geometry: Geometry, prompt: Sequence[int], committed: int) -> None:
    """Raise InputError or ContextOverflowError unless a prompt can follow ``committed`` tokens."""
    if not prompt:
        raise InputError("the prompt is empty")
    if committed + len(prompt) > geometry.context:
        before = f" after {committed} tokens of the conversation so far" if committed else ""
        raise ContextOverflowError(
            f"the prompt has {len(prompt)} tokens{before}, the bundle was exported for a context "
            f"of {geometry.context}; shorten it, or export again with a larger --context"
        )
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < geometry.vocab:
            raise InputError(f"token {token} is not one of the model's {geometry.vocab}")
