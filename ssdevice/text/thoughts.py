"""Where a model stops thinking and begins to answer: a call that it only considers is none."""

from collections.abc import Sequence

from ssdevice.text.calls import Marks, ends_in_string

OPENING = "<think>"
CLOSING = "</think>"


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the mark that begins a thought, as those of some templates do."""
    return prompt.rstrip().endswith(OPENING)


def end_of_thoughts(text: str, marks: Sequence[Marks], thinking: bool) -> int:
    """Where the answer begins after the last thought; the text's length if that is not over.

    ``marks``: those of calls, which may have ``</think>`` in a string. ``thinking``: whether the
    text begins within a thought.
    """
    begin = at = 0
    while True:
        found = text.find(CLOSING, at)
        if found < 0:
            break
        at = found + len(CLOSING)
        before = text[begin:found]
        if thinking or is_thought(before) or not _within_call(before, marks):
            begin = at
            thinking = False
    return len(text) if thinking or is_thought(text[begin:]) else begin


def is_thought(text: str) -> bool:
    """Whether a text begins a thought."""
    return text.lstrip().startswith(OPENING)


def _within_call(text: str, marks: Sequence[Marks]) -> bool:
    """Whether a text ends within a string of a call."""
    bare = text.find("{") if text.lstrip().startswith(("{", "```")) else -1
    if bare >= 0 and ends_in_string(text[bare:], '"'):
        return True
    return any(
        ends_in_string(rest, each.quote) for each in marks for rest in _rests(text, each.opening)
    )


def _rests(text: str, opening: str) -> list[str]:
    """What is after each opening."""
    found = []
    at = text.find(opening)
    while at >= 0:
        at += len(opening)
        found.append(text[at:])
        at = text.find(opening, at)
    return found
