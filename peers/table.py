"""A comparison as JSON and as Markdown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from ssdevice import __version__
from ssdevice.bench.report import arm_as_json, bounds, heading, processor, prompts_of
from ssdevice.bench.runner import BenchOptions
from ssdevice.peers.arm import Json, Setup
from ssdevice.peers.compare import Comparison, Row
from ssdevice.progress import count


def as_json(
    comparison: Comparison, setup: Setup, options: BenchOptions, data: str, skipped_prompts: int, notes: Sequence[str]
) -> Json:
    """The object that ``peers --json`` writes. ``notes``: what a reader of the table must know."""
    fastest = comparison.fastest_plain_peer
    return {
        "ssdevice": __version__,
        "model": str(setup.model),
        "data": data,
        "prompts": len(comparison.rows[0].measured.answers) if comparison.rows else 0,
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
        "fastest_plain_peer": fastest.arm.name if fastest is not None else None,
        "skipped": {skip.name: skip.reason for skip in comparison.skipped},
        "notes": list(notes),
    }


def _row(comparison: Comparison, row: Row) -> Json:
    differing, ratio = comparison.differing(row), comparison.over_fastest(row)
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
        "over_fastest_plain_peer": asdict(ratio) if ratio is not None else None,
    }


def as_markdown(report: Json) -> str:
    """The object of ``as_json`` as a table with what is skipped and noted. One that is not valid says so first."""
    prompts = report["prompts"]
    chosen = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in report["sampling"].items())
    lines = heading(report, f"{report['model']}: engines beside each other")
    lines += [
        f"{prompts_of(report)}, {chosen or 'greedy'}, at most {count(report['max_tokens'], 'token')}, "
        f"{count(report['rounds'], 'round')}, {count(report['threads'], 'thread')}, "
        f"context {report['context']}, {processor(report['machine'])}.",
        "",
        "| | weights | tokens/s | quartiles | TTFT ms | tokens/step | resident MB | MB on disk | own plain answer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in report["arms"].items():
        rounds = arm["spread"]["tokens_per_second"]
        differing = arm["differing_prompts"]
        equal = "" if differing is None else f"{prompts - len(differing)} of {prompts}"
        lines.append(
            f"| {name} | {arm['weights']} | {arm['tokens_per_second']:.1f} | {rounds['q1']:.1f}..{rounds['q3']:.1f} "
            f"| {arm['ttft_ms']:.1f} | {arm['tokens_per_step']:.2f} | {arm['resident_mb']:.0f} "
            f"| {arm['disk_mb']:.0f} | {equal} |"
        )
    lines += ["", "Versions: " + "; ".join(dict.fromkeys(arm["version"] for arm in report["arms"].values())) + "."]
    fastest = report["fastest_plain_peer"]
    for name, arm in report["arms"].items():
        ratio = arm["over_fastest_plain_peer"]
        if arm["ours"] and ratio is not None:
            lines.append(f"- {name}: {ratio['estimate']:.2f}x{bounds(ratio)} as fast by token as {fastest}")
    reasons: dict[str, list[str]] = {}
    for name, reason in report["skipped"].items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"- skipped: {'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join([*lines, *(f"- {note}" for note in report["notes"])])
