"""Measures arms in turns, one at work while all others wait.

The result is told as JSON and as Markdown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from time import sleep

from ssdevice import __version__
from ssdevice.bench.machine import Load, LoadWatch
from ssdevice.bench.report import arm_as_json, bounds, heading, quartiles, table
from ssdevice.bench.runner import WARM_UP_PROMPTS, BenchOptions, take_turns
from ssdevice.bench.statistics import Interval
from ssdevice.peers.arm import PEERS, Arm, Json, Setup, Skip, UnavailableError
from ssdevice.peers.remote import SETTLE_SECONDS, Worker
from ssdevice.progress import Report, track


@dataclass(frozen=True)
class Comparison:
    """All rows of the table, what is not in it, and the load of the machine while it was made."""

    rows: list[Worker]
    skipped: list[Skip]
    load: Load

    def differing(self, row: Worker) -> list[int] | None:
        """Prompts (from 0) on which a speculative arm gave other tokens than its plain arm.

        In any round. None for a plain arm, and for one whose plain arm is not in the table.
        """
        for other in self.rows:
            if other.arm.name == row.arm.plain:
                return row.measured.differing(other.measured)
        return None

    @property
    def baseline(self) -> Worker:
        """The plain arm of another engine that decodes fastest.

        If there is none, that of the first bundle.
        """
        plain = [row for row in self.rows if not row.arm.ours and row.arm.plain is None]
        if not plain:
            return self.rows[0]
        return max(plain, key=lambda row: row.measured.tokens_per_second.median)

    def over_baseline(self, row: Worker) -> Interval | None:
        """How many times as fast by token an arm is as the baseline; None for itself."""
        if row is self.baseline:
            return None
        return row.measured.over(self.baseline.measured)


def offers(setup: Setup, without: Sequence[str], report: Report) -> list[Arm | Skip]:
    """The arms of all peers but those in ``without``."""
    found: list[Arm | Skip] = []
    for name, module in track(report, "prepare", list(PEERS.items())):
        if name in without:
            found.append(Skip(name, "--without"))
        else:
            found += import_module(module).offers(setup)
    return found


def compare(
    offered: Sequence[Arm | Skip],
    prompts: Sequence[Sequence[int]],
    options: BenchOptions,
    report: Report,
) -> Comparison:
    """Answer every prompt (token ids) with every arm, ``options.rounds`` times.

    Arms of peers that cannot be opened are skipped. Raises UnavailableError for a bundle that
    cannot be opened, SSDeviceError for an engine that fails later.
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
        for worker in track(report, "warm up", workers):
            for prompt in prompts[:WARM_UP_PROMPTS]:
                worker.answer(prompt, options.max_tokens)
        watch = LoadWatch([worker.pid for worker in workers])
        for number, at, lane in take_turns(options.rounds, len(prompts), len(workers), report):
            sleep(SETTLE_SECONDS)
            worker = workers[lane]
            worker.measured.add(number, worker.answer(prompts[at], options.max_tokens))
        return Comparison(workers, skipped, watch.load())


def as_json(
    comparison: Comparison,
    setup: Setup,
    options: BenchOptions,
    data: str,
    skipped_prompts: int,
    notes: Sequence[str],
) -> Json:
    """The object that ``peers --json`` writes. ``notes``: what a reader of the table must know."""
    openmp = {
        name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))
    }
    return {
        "ssdevice": __version__,
        "model": str(setup.model),
        "data": data,
        "prompts": len(comparison.rows[0].measured.answers),
        "skipped_prompts": skipped_prompts,
        "rounds": options.rounds,
        "max_tokens": options.max_tokens,
        "threads": setup.threads,
        "context": setup.context,
        "stop_ids": list(setup.stops),
        "sampling": dict(setup.sampling),
        "valid": comparison.load.valid,
        "machine": comparison.load.as_json(),
        "environment": openmp,
        "arms": {row.arm.name: _row(comparison, row) for row in comparison.rows},
        "baseline": comparison.baseline.arm.name,
        "skipped": {skip.name: skip.reason for skip in comparison.skipped},
        "notes": [*notes, *_equal_answers(comparison)],
    }


def _row(comparison: Comparison, row: Worker) -> Json:
    """What is known of one arm."""
    differing = comparison.differing(row)
    ratio = comparison.over_baseline(row)
    return {
        **arm_as_json(row.measured),
        "version": row.version,
        "weights": row.weights,
        "ours": row.arm.ours,
        "plain": row.arm.plain,
        "resident_mb": round(row.resident_mb, 1),
        "peak_rss_mb": round(row.peak_mb, 1),
        "disk_mb": round(row.arm.disk_bytes / 1e6, 1),
        "equal_to_plain": None if differing is None else not differing,
        "differing_prompts": differing,
        "over_baseline": asdict(ratio) if ratio is not None else None,
    }


def _equal_answers(comparison: Comparison) -> list[str]:
    """On how many prompts each further bundle has the tokens of the first, decoding plainly."""
    first, *others = [row for row in comparison.rows if row.arm.ours and row.arm.plain is None]
    prompts = len(first.measured.answers)
    notes = list[str]()
    for row in others:
        equal = prompts - len(row.measured.differing(first.measured))
        notes.append(
            f"{row.arm.name}: the tokens of {first.arm.name} on {equal} of {prompts} prompts"
        )
    return notes


COLUMNS = (
    "",
    "weights",
    "tokens/s",
    "quartiles",
    "TTFT ms",
    "tokens/step",
    "resident MB",
    "MB on disk",
    "own plain answer",
)


def as_markdown(report: Json) -> str:
    """The object of ``as_json`` as a table, with what is skipped and noted.

    One that is not valid says so first.
    """
    arms = report["arms"]
    rows = [_cells(name, arm, report["prompts"]) for name, arm in arms.items()]
    lines = [*heading(report), *table(COLUMNS, *rows)]
    versions = dict.fromkeys(arm["version"] for arm in arms.values())  # each once, in order
    lines.append(f"Versions: {'; '.join(versions)}.")
    for name, arm in arms.items():
        ratio = arm["over_baseline"]
        if arm["ours"] and ratio is not None:
            lines.append(
                f"- {name}: {ratio['estimate']:.2f}x{bounds(ratio)} as fast by token "
                f"as {report['baseline']}"
            )
    reasons: dict[str, list[str]] = {}
    for name, reason in report["skipped"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        lines.append(f"- skipped: {'; '.join(names)}: {reason}")
    for note in report["notes"]:
        lines.append(f"- {note}")
    return "\n".join(lines)


def _cells(name: str, arm: Json, prompts: int) -> list[str]:
    """The row of an arm, by COLUMNS."""
    differing = arm["differing_prompts"]
    return [
        name,
        arm["weights"],
        f"{arm['tokens_per_second']:.1f}",
        quartiles(arm),
        f"{arm['ttft_ms']:.1f}",
        f"{arm['tokens_per_step']:.2f}",
        f"{arm['resident_mb']:.0f}",
        f"{arm['disk_mb']:.0f}",
        "" if differing is None else f"{prompts - len(differing)} of {prompts}",
    ]
