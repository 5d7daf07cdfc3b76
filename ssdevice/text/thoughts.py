"""Where a model stops thinking and begins to answer: a call that it only considers is none."""

from collections.abc import Sequence

from ssdevice.text.calls import Marks, ends_in_string

OPENING = "<think>"
CLOSING = "</think>"


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the mark that begins a thought, as those of some templates do."""
    return prompt.rstrip().endswith(OPENING)


def after_thoughts(text: str, marks: Sequence[Marks], thinking: bool) -> tuple[int, bool]:
    """Where the text goes on after its last thought that is over, and whether another one begins
    there.

    ``marks``: those of calls, which may have ``</think>`` in a string. ``thinking``: whether the
    text begins within a thought.
    """
    begin = at = 0
    while True:
        found = text.find(CLOSING, at)
        if found < 0:
            return begin, thinking or is_thought(text[begin:])
        at = found + len(CLOSING)
        before = text[begin:found]
        if thinking or is_thought(before) or not _within_call(before, marks):
            begin = at
            thinking = False


def is_thought(text: str) -> bool:
    """Whether a text begins a thought."""
    return text.lstrip().startswith(OPENING)


def _within_call(text: str, marks: Sequence[Marks]) -> bool:
    """Whether a text ends within a string of a call."""
    bare = text.find("{") if text.lstrip().startswith(("{", "```")) else -1
    if bare >= 0 and ends_in_string(text[bare:], '"'):
        return True
    for each in marks:
        at = text.find(each.opening)
        while at >= 0:
            at += len(each.opening)
            if ends_in_string(text[at:], each.quote):
                return True
            at = text.find(each.opening, at)
    return False
