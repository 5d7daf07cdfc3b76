"""Measures arms in turns: the same prompts as token ids, one arm at work while all others wait."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from time import sleep

from ssdevice.bench.machine import Load, LoadWatch
from ssdevice.bench.runner import WARM_UP_PROMPTS, BenchOptions, Measured, take_turns
from ssdevice.bench.statistics import Interval
from ssdevice.peers.arm import PEERS, Arm, Setup, Skip, UnavailableError
from ssdevice.peers.remote import SETTLE_SECONDS, Worker
from ssdevice.progress import Report, track


@dataclass(frozen=True)
class Row:
    """What was measured of an arm. ``resident_mb``: its process after the last answer; ``peak_mb``: at its most."""

    arm: Arm
    measured: Measured
    version: str
    weights: str
    resident_mb: float
    peak_mb: float


@dataclass(frozen=True)
class Comparison:
    """All rows of the table, what is not in it, and the load of the machine while it was made."""

    rows: list[Row]
    skipped: list[Skip]
    load: Load

    def differing(self, row: Row) -> list[int] | None:
        """Prompts (from 0) on which a speculative arm gave other tokens than its plain arm in any round.

        None for a plain arm, and for one whose plain arm is not in the table.
        """
        plain = next((other for other in self.rows if other.arm.name == row.arm.plain), None)
        if plain is None:
            return None
        return row.measured.differing(plain.measured)

    @property
    def baseline(self) -> Row:
        """The plain arm of another engine that decodes fastest, or that of the first bundle if there is none."""
        plain = [row for row in self.rows if not row.arm.ours and row.arm.plain is None]
        return max(plain, key=lambda row: row.measured.tokens_per_second.median, default=self.rows[0])

    def over_baseline(self, row: Row) -> Interval | None:
        """How many times as fast by token an arm is as the baseline; None for itself."""
        return row.measured.over(self.baseline.measured) if row is not self.baseline else None


def offers(setup: Setup, without: Sequence[str], report: Report) -> list[Arm | Skip]:
    """The arms of all peers but those in ``without``."""
    found: list[Arm | Skip] = []
    for name, module in track(report, "prepare", list(PEERS.items())):
        found += [Skip(name, "--without")] if name in without else import_module(module).offers(setup)
    return found


def compare(
    offered: Sequence[Arm | Skip], prompts: Sequence[Sequence[int]], options: BenchOptions, report: Report
) -> Comparison:
    """Answer every prompt (token ids) with every arm, ``options.rounds`` times.

    Arms of peers that cannot be opened are skipped. Raises UnavailableError for a bundle that cannot be opened,
    SSDeviceError for an engine that fails later.
    """
    skipped = [found for found in offered if isinstance(found, Skip)]
    arms = [found for found in offered if isinstance(found, Arm)]
    workers: list[Worker] = []
    with ExitStack() as stack:
        for arm in track(report, "open", arms):
            try:
                workers.append(stack.enter_context(Worker(arm)))
            except UnavailableError as error:
                if arm.ours:
                    raise
                skipped.append(Skip(arm.name, str(error)))
        measured = [Measured(worker.arm.name) for worker in workers]
        for worker in track(report, "warm up", workers):
            for prompt in prompts[:WARM_UP_PROMPTS]:
                worker.answer(prompt, options.max_tokens)
        watch = LoadWatch([worker.pid for worker in workers])
        for number, at, lane in take_turns(options.rounds, len(prompts), len(workers), report):
            sleep(SETTLE_SECONDS)
            measured[lane].add(number, workers[lane].answer(prompts[at], options.max_tokens))
        load = watch.load()
        rows = [
            Row(worker.arm, found, worker.version, worker.weights, worker.resident_mb(), worker.peak_mb)
            for worker, found in zip(workers, measured, strict=True)
        ]
    return Comparison(rows, skipped, load)
