"""What a process says once on stderr."""

from __future__ import annotations

import sys

_said: set[str] = set()


def say_once(text: str) -> None:
    """Print a line on stderr unless this process did so before."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)
