"""Progress on stderr: a live line on a terminal, a line every few seconds in a file, silence with
--quiet.
"""

import sys
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.status import Status


LINE_SECONDS = 5.0
"""Time between lines if stderr is not a terminal; short commands print none."""
TICK_SECONDS = 1.0


class Progress:
    """Context manager whose ``report(stage, done, total, detail)`` shows where work is, also while
    a stage is silent: one call into a library can take a minute.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        now = time.monotonic()
        self._printed = now
        self._began = now
        self._moved = now
        self._stage = ""
        self._detail = ""
        self._first = 0
        self._done = 0
        self._total = 0
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._status: Status | None = None

    def __enter__(self) -> Self:
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
        """Show that ``done`` of ``total`` parts of a stage are finished; see
        ``ssdevice.progress.Report``.
        """
        now = time.monotonic()
        if stage != self._stage:
            self._began = now
            self._first = done
        if (stage, done, total) != (self._stage, self._done, self._total):
            self._moved = now
        self._stage = stage
        self._done = done
        self._total = total
        self._detail = detail
        self._show()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._show()

    def _show(self) -> None:
        """Show where the stage is; in a file only if the last line is old enough."""
        if not self._stage or self.quiet:
            return
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(self.line()))
            return
        now = time.monotonic()
        if now - self._printed >= LINE_SECONDS:
            self._printed = now
            print(self.line(), file=sys.stderr, flush=True)

    def left(self) -> float | None:
        """Seconds at the pace so far, None before the first part is done; below 0 if a part takes
        longer than that.
        """
        share = (self._done - self._first) / max(1, self._total - self._first)
        if share <= 0:
            return None
        since = time.monotonic() - self._moved
        return (self._moved - self._began) / share * (1 - share) - since

    def line(self) -> str:
        """``export 37/100, 52 s so far, about 80 s left: write the graphs, step_plain``; never 0 s
        left.
        """
        left = self.left()
        times = [f"{duration(time.monotonic() - self._began)} so far"]
        if left is not None and self._done < self._total:
            times.append(f"about {duration(left)} left" if left >= 0.5 else "longer than expected")
        where = ", ".join([f"{self._stage} {self._done}/{self._total}", *times])
        return f"{where}: {self._detail}" if self._detail else where


def duration(seconds: float) -> str:
    """Seconds in a unit a reader can use."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
