"""How long work says where it is; ``ssdevice.commands.progress`` shows it."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str, int, int, str], None]
"""Called with what is being done, how many parts of it are done, how many there are, and a note (may be empty)."""


def duration(seconds: float) -> str:
    """Seconds in a unit a reader can use."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
