"""What a user is told on stderr once."""

from __future__ import annotations

import sys

_said: set[str] = set()


def say_once(text: str) -> None:
    """Tell on stderr what a process need not hear twice."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)
