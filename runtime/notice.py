"""Messages that a process prints only once."""

from __future__ import annotations

import sys

_said: set[str] = set()


def say_once(text: str) -> None:
    """Print a line on stderr unless this process has already printed it."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)
