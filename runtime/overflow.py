"""What becomes of a conversation that outgrows the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.text.messages import Chat

ERROR, DROP_OLDEST = "error", "drop-oldest"
OVERFLOWS = (ERROR, DROP_OLDEST)


def check_overflow(overflow: object) -> None:
    """Raise InputError for what is none of OVERFLOWS."""
    if overflow not in OVERFLOWS:
        raise InputError(f"overflow is {repr(overflow)[:60]}, expected {' or '.join(map(repr, OVERFLOWS))}")


def fitting(
    chat: Chat, ids_of: Callable[[Chat], list[int]], context: int, overflow: str, max_tokens: int
) -> tuple[list[int], Chat]:
    """The tokens of a conversation, and what is left of it with DROP_OLDEST: it then fits together with its answer.

    The answer has room for ``max_tokens``, at most half of the context. Only the oldest turns are dropped, and as few
    of them as possible; the last one stays, whether it fits or not.
    """
    if overflow == ERROR:
        return ids_of(chat), chat
    room, most = min(max_tokens, context // 2), len(chat.turns) - 1
    found: dict[int, list[int]] = {}

    def fits(turns: int) -> bool:
        try:
            found[turns] = ids_of(chat.without(turns))
        except ContextOverflowError:
            return False
        return len(found[turns]) + room <= context

    # Most conversations fit whole.
    turns = 0 if fits(0) else bisect_left(range(most), True, lo=min(1, most), key=fits)
    kept = chat.without(turns)
    return found[turns] if turns in found else ids_of(kept), kept
