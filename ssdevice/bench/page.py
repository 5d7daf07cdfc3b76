"""A measurement as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from ssdevice.bench.report import TITLES, Json, bounds, processor, prompts_of, title, why_not_valid
from ssdevice.bundle.staging import write_json, write_text
from ssdevice.runtime.loop import ADAPTIVE, PLAIN_STEP, SPECULATIVE

PAGE, DATA = "index.html", "report.json"
TEMPLATE = Path(__file__).with_name("page.html")
"""Plain decoding through the step's graph, which is there to compare bits: that it is slower is no loss."""
COLORS = {"plain": "c0", PLAIN_STEP: "c1", SPECULATIVE: "c2", ADAPTIVE: "c3"}


def write_page(report: Json, folder: Path, command: Sequence[str]) -> None:
    """Write ``index.html`` and ``report.json`` into a folder, which is made. ``command``: the words that measured it.

    ``report``: from ``bench.report.as_json``, with another bundle's in ``beside``, or from ``peers.table.as_json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DATA, report)
    write_text(folder / PAGE, page(report, command))


def page(report: Json, command: Sequence[str]) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["words"] = _words
    beside = report.get("beside")
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        sections=[_section(one) for one in (report, *([beside["report"]] if beside else []))],
        beside=beside,
        command=shlex.join(command),
        facts=_facts(report),
    )


def _words(name: str) -> str:
    """The name of a mode or peer as a reader sees it."""
    return TITLES.get(name, name)


def _section(report: Json) -> Json:
    """What the page shows of one bundle, or of one comparison with peers."""
    # The plain arm that others are compared with; None if nothing plain was measured.
    base = report["arms"].get(report.get("baseline") or report.get("fastest_plain_peer"))
    name = (
        title(report, Path(report["bundle"]).name)
        if "bundle" in report
        else f"{Path(report['model']).name} beside other engines"
    )
    return {
        "title": name,
        "prompts": prompts_of(report),
        "invalid": None if report["valid"] else why_not_valid(report),
        "numbers": _numbers(report),
        "losses": _losses(report, base),
        "equal": report.get("equal"),
        "arms": [_arm(number, name, report, base) for number, name in enumerate(report["arms"])],
        "most": max(speed or 0 for arm in report["arms"].values() for speed in arm["prompt_tokens_per_second"]) or 1,
    }


def _numbers(report: Json) -> list[tuple[str, str, str]]:
    """The headline: numbers, what they are, and the class of one that is bad news."""
    arms, speedup = report["arms"], report.get("speedup_interval")
    best = max(arms, key=lambda name: arms[name]["tokens_per_second"])
    numbers = [(f"{arms[best]['tokens_per_second']:.1f}", f"tokens/s, {_words(best)}", "")]
    if speedup is not None:
        label = f"speed-up of speculation{bounds(speedup)}"
        numbers.append((f"{speedup['estimate']:.2f}x", label, "bad" if speedup["estimate"] < 1 else ""))
    if SPECULATIVE in arms:
        numbers.append((f"{arms[SPECULATIVE]['tokens_per_step']:.2f}", "tokens per step (β)", ""))
    return [*numbers, (f"{arms[best]['ttft_ms']:.0f} ms", "time to first token", "")]


def _losses(report: Json, base: Json | None) -> list[str]:
    """What went worse than plain decoding, in words."""
    lines = []
    for name, arm in report["arms"].items():
        if base is None or arm is base or name == PLAIN_STEP:
            continue
        pairs = zip(arm["prompt_tokens_per_second"], base["prompt_tokens_per_second"], strict=True)
        slower = sum(mine < theirs for mine, theirs in pairs if mine and theirs)
        if slower:
            count = len(arm["prompt_tokens_per_second"])
            lines.append(f"{_words(name)} is slower than the fastest plain one on {slower} of {count} prompts")
    for name, prompts in report.get("differing_prompts", {}).items():
        first = f"the first is prompt {min(prompts) + 1}"
        lines.append(f"{_words(name)} gave other tokens on {len(prompts)} prompts; {first}")
    return lines + [f"{name} was left out: {reason}" for name, reason in report.get("skipped", {}).items()]


def _arm(number: int, name: str, report: Json, base: Json | None) -> Json:
    """A row of the table, and what the plots show of it."""
    arm = report["arms"][name]
    spread = arm["spread"]["tokens_per_second"]
    ratio = arm["tokens_per_second"] / base["tokens_per_second"] if base and base["tokens_per_second"] else None
    return {
        "title": _words(name),
        "color": COLORS.get(name, f"c{number % len(COLORS)}"),
        "bad": ratio is not None and ratio < 1 and name != PLAIN_STEP,
        "cells": (
            _words(name),
            f"{arm['tokens_per_second']:.1f}",
            f"{spread['q1']:.1f}..{spread['q3']:.1f}",
            f"{ratio:.2f}x" if ratio is not None else "",
            f"{arm['tokens_per_step']:.2f}",
            f"{arm['ttft_ms']:.1f}",
            f"{arm['resident_mb']:.0f}" if arm["resident_mb"] is not None else "",
            f"{arm.get('disk_mb', report.get('model_mb')):.1f}",
        ),
        "speeds": arm["prompt_tokens_per_second"],
        "histogram": arm.get("accepted_histogram"),
    }


def _facts(report: Json) -> dict[str, str]:
    """How the numbers came about: machine, setting and versions."""
    machine = report["machine"]
    versions = {"ssdevice": report["ssdevice"], "Python": machine["python"], **report.get("versions", {})}
    rows = {
        "processor": processor(machine),
        "system": machine["system"],
        "threads": str(report["threads"] or "the engine's default"),
        "rounds": f"{report['rounds']}, at most {report['max_tokens']} tokens",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }
    engines = sorted({arm["version"] for arm in report["arms"].values() if "version" in arm})
    if engines:
        rows["engines"] = ", ".join(engines)
    if "bundle" in report:
        rows["kernels"] = "those of ssdevice kernels" if report["kernels"] else "the engine's own"
        own = report["app_bytes"]
        more = f"; the app's own files: {own / 1e6:.1f} MB" if own else "; no files of the app's own"
        rows["parameters"] = f"{report['parameters'] / 1e6:.1f} M in the base{more}"
        rows["tree"] = (
            f"{len(report['tree']) + 1} nodes, γ = {report['gamma']}, k = {report['k']}, {report['schedule']}"
        )
    return rows
