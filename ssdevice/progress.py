"""How long-running work reports its progress; ``ssdevice.commands.progress`` shows it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Report = Callable[[str, int, int, str], None]
"""Called with the stage, the parts done, the number of parts, and a note (which may be empty)."""


def track(report: Report, stage: str, items: Sequence[T]) -> Iterator[T]:
    """The items one by one, each reported as a part of ``stage``."""
    for number, item in enumerate(items):
        report(stage, number, len(items), "")
        yield item
    report(stage, len(items), len(items), "")


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``: for nouns whose plural ends in s."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"
