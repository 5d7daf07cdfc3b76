"""A comparison as JSON and as Markdown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from ssdevice import __version__
from ssdevice.bench.report import arm_as_json, bounds, heading, quartiles, table
from ssdevice.bench.runner import BenchOptions
from ssdevice.peers.arm import Json, Setup
from ssdevice.peers.compare import Comparison, Row


def as_json(
    comparison: Comparison, setup: Setup, options: BenchOptions, data: str, skipped_prompts: int, notes: Sequence[str]
) -> Json:
    """The object that ``peers --json`` writes. ``notes``: what a reader of the table must know."""
    return {
        "title": f"{setup.model}: engines beside each other",
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
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))},
        "arms": {row.arm.name: _row(comparison, row) for row in comparison.rows},
        "baseline": comparison.baseline.arm.name,
        "skipped": {skip.name: skip.reason for skip in comparison.skipped},
        "notes": [*notes, *_equal_answers(comparison)],
    }


def _row(comparison: Comparison, row: Row) -> Json:
    differing, ratio = comparison.differing(row), comparison.over_baseline(row)
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
    """On how many prompts each further bundle has the tokens of the first, both decoding plainly."""
    first, *others = [row for row in comparison.rows if row.arm.ours and row.arm.plain is None]
    prompts = len(first.measured.answers)
    equal = [(row.arm.name, prompts - len(row.measured.differing(first.measured))) for row in others]
    return [f"{name}: the tokens of {first.arm.name} on {number} of {prompts} prompts" for name, number in equal]


COLUMNS = (
    "", "weights", "tokens/s", "quartiles", "TTFT ms", "tokens/step", "resident MB", "MB on disk", "own plain answer",
)  # fmt: skip


def as_markdown(report: Json) -> str:
    """The object of ``as_json`` as a table with what is skipped and noted. One that is not valid says so first."""
    arms = report["arms"]
    lines = [*heading(report), *table(COLUMNS, *(_cells(name, arm, report["prompts"]) for name, arm in arms.items()))]
    lines.append("Versions: " + "; ".join(dict.fromkeys(arm["version"] for arm in arms.values())) + ".")
    for name, arm in arms.items():
        ratio = arm["over_baseline"]
        if arm["ours"] and ratio is not None:
            lines.append(f"- {name}: {ratio['estimate']:.2f}x{bounds(ratio)} as fast by token as {report['baseline']}")
    reasons: dict[str, list[str]] = {}
    for name, reason in report["skipped"].items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"- skipped: {'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join([*lines, *(f"- {note}" for note in report["notes"])])


def _cells(name: str, arm: Json, prompts: int) -> list[str]:
    differing = arm["differing_prompts"]
    return [
        name, arm["weights"], f"{arm['tokens_per_second']:.1f}", quartiles(arm), f"{arm['ttft_ms']:.1f}",
        f"{arm['tokens_per_step']:.2f}", f"{arm['resident_mb']:.0f}", f"{arm['disk_mb']:.0f}",
        "" if differing is None else f"{prompts - len(differing)} of {prompts}",
    ]  # fmt: skip
