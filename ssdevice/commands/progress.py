"""Progress on stderr: a live line on a terminal, a line every few seconds in a file, silence with --quiet."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


LINE_SECONDS = 10.0
"""Time between lines if stderr is not a terminal; short commands print none."""


class Progress:
    """Context manager whose ``report(stage, done, total, detail)`` draws one bar per stage, or writes lines."""

    def __init__(self, quiet: bool) -> None:
        self.live = not quiet and sys.stderr.isatty()
        self.lines = not quiet and not self.live
        self._last = time.monotonic()
        self._began: dict[str, tuple[float, int]] = {}
        self._bar: Bar | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Progress:
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, TextColumn("{task.fields[detail]}"), console=Console(stderr=True))
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """Show that ``done`` of ``total`` parts of a stage are finished; see ``ssdevice.progress.Report``."""
        if self.lines:
            self._line(stage, done, total, detail)
        if self._bar is None:
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total, detail="")
        self._bar.update(self._tasks[stage], completed=done, total=total, detail=detail)

    def _line(self, stage: str, done: int, total: int, detail: str) -> None:
        now = time.monotonic()
        first, before = self._began.setdefault(stage, (now, done))
        if now - self._last < LINE_SECONDS:
            return
        self._last = now
        left = f", {(now - first) / (done - before) * (total - done):.0f} s left" if done > before else ""
        print(f"{stage} {done}/{total}{left} {detail}".rstrip(), file=sys.stderr, flush=True)
