"""Progress on stderr: a live line on a terminal, a line every few seconds in a file, silence with --quiet."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


LINE_SECONDS = 5.0
"""Time between lines if stderr is not a terminal; short commands print none."""
TICK_SECONDS = 1.0


class Progress:
    """Context manager whose ``report(stage, done, total, detail)`` draws one bar per stage, or writes lines.

    Lines appear while a stage is silent too: one call into a library can take a minute.
    """

    def __init__(self, quiet: bool) -> None:
        self.live = not quiet and sys.stderr.isatty()
        self.lines = not quiet and not self.live
        self._printed = time.monotonic()
        self._stage: _Stage | None = None
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._bar: Bar | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Progress:
        if self.lines:
            self._ticker.start()
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            text = TextColumn("{task.fields[left]} {task.fields[detail]}")
            self._bar = Bar(*columns, text, console=Console(stderr=True))
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self.lines:
            self._ticker.join()
        if self._bar is not None:
            self._bar.stop()

    def report(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """Show that ``done`` of ``total`` parts of a stage are finished; see ``ssdevice.progress.Report``."""
        if self._stage is None or self._stage.name != stage:
            self._stage = _Stage(stage, done)
        self._stage.move(done, total, detail)
        if self.lines:
            self._line()
        if self._bar is None:
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total, left="", detail="")
        left = self._stage.left_text()
        self._bar.update(self._tasks[stage], completed=done, total=total, left=left, detail=detail)

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._line()

    def _line(self) -> None:
        """Print where the stage is, if the last line is old enough."""
        now = time.monotonic()
        if self._stage is None or now - self._printed < LINE_SECONDS:
            return
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
