"""A measurement as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from ssdevice.bench import report as reports
from ssdevice.bench.report import TITLES, Json, quartiles
from ssdevice.bundle.staging import write_json, write_text
from ssdevice.runtime.loop import PLAIN_STEP, SPECULATIVE

PAGE, DATA = "index.html", "report.json"
TEMPLATE = Path(__file__).with_name("page.html")


def write_page(report: Json, folder: Path, command: Sequence[str]) -> None:
    """Write ``index.html`` and ``report.json`` into a folder, which is made. ``command``: the words that measured it.

    ``report``: from ``bench.report.as_json``, or from ``peers.compare.as_json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DATA, report)
    write_text(folder / PAGE, page(report, command))


def page(report: Json, command: Sequence[str]) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters.update(words=_words, quartiles=quartiles)
    # The plain arm that others are compared with; None if nothing plain was measured.
    base = report["arms"].get(report["baseline"])
    speeds = [speed or 0 for arm in report["arms"].values() for speed in arm["prompt_tokens_per_second"]]
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report,
        title=reports.title(report),
        base=base,
        invalid=None if report["valid"] else reports.why_not_valid(report),
        numbers=_numbers(report),
        losses=_losses(report, base),
        most=max(speeds, default=0) or 1,
        command=shlex.join(command),
        facts=_facts(report),
    )


def _words(name: str) -> str:
    """The name of a mode or peer as a reader sees it."""
    return TITLES.get(name, name)


def _numbers(report: Json) -> list[tuple[str, str, str]]:
    """The headline: numbers, what they are, and the class of one that is bad news."""
    arms, speedup = report["arms"], report.get("speedup_interval")
    best = max(arms, key=lambda name: arms[name]["tokens_per_second"])
    numbers = [(f"{arms[best]['tokens_per_second']:.1f}", f"tokens/s, {_words(best)}", "")]
    if speedup is not None:
        label = f"speed-up of speculation{reports.bounds(speedup)}"
        numbers.append((f"{speedup['estimate']:.2f}x", label, "bad" if speedup["estimate"] < 1 else ""))
    if SPECULATIVE in arms:
        numbers.append((f"{arms[SPECULATIVE]['tokens_per_step']:.2f}", "tokens per step (β)", ""))
    return [*numbers, (f"{arms[best]['ttft_ms']:.0f} ms", "time to first token", "")]


def _losses(report: Json, base: Json | None) -> list[str]:
    """What went worse than plain decoding, in words."""
    lines = []
    for name, arm in report["arms"].items():
        if base is None or arm is base or name == PLAIN_STEP:  # which is there to compare bits
            continue
        pairs = zip(arm["prompt_tokens_per_second"], base["prompt_tokens_per_second"], strict=True)
        slower = sum(mine < theirs for mine, theirs in pairs if mine and theirs)
        if slower:
            count = len(arm["prompt_tokens_per_second"])
            lines.append(f"{_words(name)} is slower than the fastest plain one on {slower} of {count} prompts")
    lines += reports.differences(report) if "bundle" in report else []
    return lines + [f"{name} was left out: {reason}" for name, reason in report.get("skipped", {}).items()]


def _facts(report: Json) -> dict[str, str]:
    """How the numbers came about: setting, machine and versions."""
    machine = report["machine"]
    versions = {"ssdevice": report["ssdevice"], "Python": machine["python"], **report.get("versions", {})}
    engines = sorted({arm["version"] for arm in report["arms"].values() if "version" in arm})
    return {
        "measured": reports.conditions(report),
        "bundle": reports.described(report) if "bundle" in report else "",
        "system": machine["system"],
        "versions": ", ".join([*(f"{name} {number}" for name, number in versions.items()), *engines]),
    }
