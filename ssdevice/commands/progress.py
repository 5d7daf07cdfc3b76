"""Progress on stderr: a live line on a terminal, a line every few seconds in a file, silence with --quiet."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status


LINE_SECONDS = 5.0
"""Time between lines if stderr is not a terminal; short commands print none."""
TICK_SECONDS = 1.0


class Progress:
    """Context manager whose ``report(stage, done, total, detail)`` shows where work is, also while a stage is silent:
    one call into a library can take a minute."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._printed = time.monotonic()
        self._stage: _Stage | None = None
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        if not self.quiet:
            if sys.stderr.isatty():
                from rich.console import Console

                self._status = Console(stderr=True).status("")
                self._status.start()
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if not self.quiet:
            self._ticker.join()
        if self._status is not None:
            self._status.stop()

    def report(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """Show that ``done`` of ``total`` parts of a stage are finished; see ``ssdevice.progress.Report``."""
        if self._stage is None or self._stage.name != stage:
            self._stage = _Stage(stage, done)
        self._stage.move(done, total, detail)
        self._show()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._show()

    def _show(self) -> None:
        """Show where the stage is; in a file only if the last line is old enough."""
        if self._stage is None or self.quiet:
            return
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(self._stage.line()))
        elif (now := time.monotonic()) - self._printed >= LINE_SECONDS:
            self._printed = now
            print(self._stage.line(), file=sys.stderr, flush=True)


class _Stage:
    """Where a stage is, and how long it has yet to go."""

    def __init__(self, name: str, first: int) -> None:
        self.name, self.first = name, first
        self.began = self.moved = time.monotonic()
        self.done, self.total, self.detail = first, 0, ""

    def move(self, done: int, total: int, detail: str) -> None:
        if (done, total) != (self.done, self.total):
            self.moved = time.monotonic()
        self.done, self.total, self.detail = done, total, detail

    def left(self) -> float | None:
        """Seconds at the pace so far, None before the first part is done; below 0 if a part takes longer than that."""
        now = time.monotonic()
        share = (self.done - self.first) / max(1, self.total - self.first)
        return (self.moved - self.began) / share * (1 - share) - (now - self.moved) if share > 0 else None

    def left_text(self) -> str:
        """``about 80 s left``; nothing where nobody knows or nothing is left, and never 0 s while work remains."""
        seconds = self.left()
        if seconds is None or self.done >= self.total:
            return ""
        return f"about {duration(seconds)} left" if seconds >= 0.5 else "longer than expected"

    def line(self) -> str:
        """``export 37/100, 52 s so far, about 80 s left: write the graphs, step_plain``."""
        times = [f"{duration(time.monotonic() - self.began)} so far", self.left_text()]
        where = ", ".join([f"{self.name} {self.done}/{self.total}", *filter(None, times)])
        return f"{where}: {self.detail}" if self.detail else where


def duration(seconds: float) -> str:
    """Seconds in a unit a reader can use."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
