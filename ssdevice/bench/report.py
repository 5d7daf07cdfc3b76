"""A measurement as JSON, as Markdown, and as one HTML page.

The page has no scripts, fonts or pictures from elsewhere.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ssdevice import __version__
from ssdevice.bench.machine import LOADED
from ssdevice.bench.quality import choose_metric, score
from ssdevice.bench.runner import BenchOptions, BenchResult, Measured
from ssdevice.bench.statistics import mean_interval
from ssdevice.bundle.staging import disk_errors, write_json, write_text
from ssdevice.config import to_json
from ssdevice.contract import Geometry
from ssdevice.progress import count
from ssdevice.runtime.loop import ADAPTIVE, PLAIN_STEP, SPECULATIVE

Json = dict[str, Any]


def quality_of(result: BenchResult, metric: str | None) -> Json:
    """Scores by mode with 95 % intervals; empty if an example has no target.

    ``metric``: see ``choose_metric``.
    """
    chosen = choose_metric(result.examples, metric)
    if chosen is None:
        return {}
    found: Json = {"metric": chosen}
    for name, mode in result.modes.items():
        # Equal tokens have equal scores, so one mode is enough then.
        if name == SPECULATIVE or result.differing(name) or SPECULATIVE not in result.modes:
            columns = score(chosen, [answer.text for answer in mode.answers], result.examples)
            found[name] = {
                column: asdict(mean_interval(values)) for column, values in columns.items()
            }
    return found


def as_json(
    setting: Json,
    geometry: Geometry,
    options: BenchOptions,
    result: BenchResult,
    quality: Json,
    memory: Json,
) -> Json:
    """The object ``bench --json`` writes.

    ``setting``: what was measured, which becomes a part of it as it is.
    """
    speedup = result.speedup
    drafts = result.acceptance.table(geometry.gamma, geometry.k)
    differing = {name: result.differing(name) for name in result.modes}
    arms = dict[str, Json]()
    for name, mode in result.modes.items():
        arms[name] = _mode(mode, result, geometry, memory.get(name))
    shares = list[list[float]]()
    for row in drafts:
        shares.append([round(share, 4) for share in row])
    return {
        **setting,
        "tree": to_json(geometry.tree),
        "gamma": geometry.gamma,
        "k": geometry.k,
        "context": geometry.context,
        "prompts": len(result.examples),
        "skipped_prompts": result.skipped,
        "rounds": options.rounds,
        "max_tokens": options.max_tokens,
        "valid": result.load.valid,
        "machine": result.load.as_json(),
        "ssdevice": __version__,
        "arms": arms,
        "equal": result.equal,
        "differing_prompts": {name: prompts for name, prompts in differing.items() if prompts},
        "baseline": result.baseline.name if result.baseline else None,
        "speedup": round(speedup.estimate, 4) if speedup else None,
        "speedup_interval": asdict(speedup) if speedup else None,
        "acceptance_by_stream_and_rank": shares,
        "quality": quality,
    }


def _mode(mode: Measured, result: BenchResult, geometry: Geometry, memory: Json | None) -> Json:
    found = arm_as_json(mode) | {
        "prefill_tokens_per_second": round(mode.prefill_tokens_per_second.median, 2),
        "host_us_per_step": round(mode.host_us_per_step.median, 2),
        "native_ms_per_step": round(mode.native_ms_per_step.median, 4),
        **(memory or {"resident_mb": None, "peak_rss_mb": None}),
        "steps": sum(answer.steps for answer in mode.answers),
    }
    found["spread"]["native_ms_per_step"] = asdict(mode.native_ms_per_step)
    if mode.name == SPECULATIVE:
        found["accepted_histogram"] = result.acceptance.histogram(geometry.tree.emitted)
    return found


def arm_as_json(mode: Measured) -> Json:
    """What is known of every arm, whether it is a bundle's or a peer's."""
    return {
        "tokens_per_second": round(mode.tokens_per_second.median, 3),
        "tokens_per_step": round(mode.tokens_per_step, 4),
        "ttft_ms": round(mode.ttft_ms.median, 3),
        "tokens": sum(len(answer.tokens) for answer in mode.answers),
        "prompt_tokens_per_second": [
            None if one is None else round(one, 3) for one in mode.prompt_tokens_per_second
        ],
        "spread": {
            "tokens_per_second": asdict(mode.tokens_per_second),
            "ttft_ms": asdict(mode.ttft_ms),
        },
    }


TITLES = {
    "plain": "plain (T = 1 graph)",
    "plain_step": "plain (step graph)",
    SPECULATIVE: "speculative",
    ADAPTIVE: "adaptive (plain where drafts fail)",
}


def bounds(interval: Json, digits: int = 2, label: str = "") -> str:
    """The bounds of an interval in brackets, after ``label``; empty if it has none."""
    low = interval["low"]
    high = interval["high"]
    if low is None:
        return ""
    return f" ({label}{low:.{digits}f}..{high:.{digits}f})"


def conditions(report: Json) -> str:
    """How the numbers of a report came about, in words."""
    left_out = ""
    if report["skipped_prompts"]:
        left_out = f" ({report['skipped_prompts']} longer ones left out)"
    sampling = report["sampling"] or {}
    chosen = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in sampling.items())
    threads = report["threads"]
    used = count(threads, "thread") if threads else "the engine's threads"
    machine = report["machine"]
    hardware = ", ".join([f"{machine['cores']} cores", *machine["instructions"]])
    return (
        f"{count(report['prompts'], 'prompt')} of {report['data']}{left_out}, "
        f"{chosen or 'greedy'}, at most {count(report['max_tokens'], 'token')}, "
        f"{count(report['rounds'], 'round')}, {used}, context {report['context']}, "
        f"{machine['cpu']} ({hardware})."
    )


def described(report: Json) -> str:
    """The bundle of a report of ``as_json``, in words."""
    own = ""
    if report["app_bytes"]:
        own = f", {report['app_bytes'] / 1e6:.1f} MB of them only for the app"
    kernels = "our kernels" if report["kernels"] else "the engine's kernels"
    return (
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['model_mb']:.1f} MB{own}, "
        f"tree of {len(report['tree']) + 1} nodes, γ = {report['gamma']}, k = {report['k']}, "
        f"{report['schedule']} schedule, {kernels}."
    )


def why_not_valid(report: Json) -> str:
    """Why the times of a report with ``valid: false`` do not count."""
    return (
        f"other processes used {report['machine']['others_cpu_share']:.0%} of the machine during "
        f"the run (at most {LOADED:.0%} is allowed). Do not quote the times below."
    )


def title(report: Json) -> str:
    """What was measured: a bundle, or engines with the same weights."""
    if "bundle" not in report:
        return f"{report['model']}: engines beside each other"
    return "{bundle}: {precision} {target}, app {app}".format(**report)


def heading(report: Json) -> list[str]:
    """The first lines of a report: its title, whether its times count, and how they came about."""
    invalid = [] if report["valid"] else [f"**Not valid:** {why_not_valid(report)}", ""]
    return [f"## {title(report)}", "", *invalid, conditions(report)]


def table(*rows: Sequence[str]) -> list[str]:
    """A table in Markdown; the first row is its head."""
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    line = "|---" * len(rows[0]) + "|"
    return ["", head, line, *rest, ""]


def quartiles(arm: Json) -> str:
    """The quartiles of an arm's tokens per second over the rounds."""
    return "{q1:.1f}..{q3:.1f}".format(**arm["spread"]["tokens_per_second"])


COLUMNS = (
    "",
    "tokens/s",
    "quartiles",
    "tokens/step",
    "ms/step",
    "host µs/step",
    "TTFT ms",
    "prefill tokens/s",
    "resident MB",
    "peak MB",
)


def as_markdown(report: Json) -> str:
    """The report of ``as_json`` as Markdown. A measurement that is not valid says so first."""
    lines = [
        *heading(report),
        described(report),
        *table(COLUMNS, *(_cells(*each) for each in report["arms"].items())),
    ]
    if report["speedup"] is not None:
        interval = bounds(report["speedup_interval"], label="95 % interval over prompts: ")
        lines.append(
            f"**Speed-up {report['speedup']:.2f}x** over {TITLES[report['baseline']]}{interval}."
        )
    differing = "; ".join(differences(report))
    if differing:
        lines.append(f"**{differing}**. `ssdevice verify` tells near-ties from faults.")
    else:
        lines.append(f"All decoding modes gave the same tokens on all {report['prompts']} prompts.")
    if SPECULATIVE in report["arms"]:
        lines += _acceptance(report)
    for name, columns in report["quality"].items():
        if name != "metric":
            values = [
                f"{column} {value['estimate']:.3f}{bounds(value, 3)}"
                for column, value in columns.items()
            ]
            lines += ["", f"Quality, {TITLES[name]}: {', '.join(values)}."]
    return "\n".join(lines)


def _cells(name: str, arm: Json) -> list[str]:
    return [
        TITLES[name],
        f"{arm['tokens_per_second']:.1f}",
        quartiles(arm),
        f"{arm['tokens_per_step']:.2f}",
        f"{arm['native_ms_per_step']:.2f}",
        f"{arm['host_us_per_step']:.0f}",
        f"{arm['ttft_ms']:.1f}",
        f"{arm['prefill_tokens_per_second']:.0f}",
        f"{arm['resident_mb']:.0f}",
        f"{arm['peak_rss_mb']:.0f}",
    ]


def differences(report: Json) -> list[str]:
    """Which modes gave other tokens than plain decoding, and where, one sentence each.

    The first sentence says so if that is meant.
    """
    found = list[str]()
    if "typical_acceptance" in (report["sampling"] or {}):
        found.append("Inexact: typical acceptance changes the text")
    for name, prompts in report["differing_prompts"].items():
        found.append(
            f"{TITLES[name]} gave other tokens on {count(len(prompts), 'prompt')}; "
            f"the first is prompt {min(prompts) + 1}"
        )
    return found


def _acceptance(report: Json) -> list[str]:
    """What became of drafts, as lines of Markdown."""
    histogram = report["arms"][SPECULATIVE]["accepted_histogram"]
    all_steps = max(sum(histogram), 1)
    shares = ", ".join(
        f"{tokens}: {steps / all_steps:.0%}" for tokens, steps in enumerate(histogram, 1)
    )
    rows = list[list[str]]()
    for stream, ranks in enumerate(report["acceptance_by_stream_and_rank"], 1):
        rows.append([str(stream), *(f"{share:.1%}" for share in ranks)])
    columns = ["stream", *(f"rank {rank}" for rank in range(report["k"]))]
    return [
        "",
        f"Tokens per step: {shares}.",
        "",
        "Share of true tokens among drafts:",
        *table(columns, *rows)[:-1],
    ]


PAGE = "index.html"
DATA = "report.json"
TEMPLATE = Path(__file__).with_name("page.html")


def write_page(report: Json, folder: Path, command: Sequence[str]) -> None:
    """Write ``index.html`` and ``report.json`` into a folder, which is made.

    ``report``: of ``as_json`` here or in ``peers.compare``. ``command``: the words that measured
    it.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DATA, report)
    write_text(folder / PAGE, page(report, command))


def page(report: Json, command: Sequence[str]) -> str:
    """The HTML page; arguments as for ``write_page``."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters.update(words=_words, quartiles=quartiles)
    # The plain arm that others are compared with; None if nothing plain was measured.
    base = report["arms"].get(report["baseline"])
    speeds = list[float]()
    for arm in report["arms"].values():
        speeds += [speed or 0 for speed in arm["prompt_tokens_per_second"]]
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report,
        title=title(report),
        base=base,
        invalid=None if report["valid"] else why_not_valid(report),
        numbers=_numbers(report),
        losses=_losses(report, base),
        most=max(speeds, default=0) or 1,
        command=shlex.join(command),
        facts=_facts(report),
    )


def _words(name: str) -> str:
    """An arm in words."""
    return TITLES.get(name, name)


def _numbers(report: Json) -> list[tuple[str, str, str]]:
    """The headline: numbers, what they are, and the class of one that is bad news."""
    arms = report["arms"]
    speedup = report.get("speedup_interval")
    best = max(arms, key=lambda name: arms[name]["tokens_per_second"])
    numbers = [(f"{arms[best]['tokens_per_second']:.1f}", f"tokens/s, {_words(best)}", "")]
    if speedup is not None:
        label = f"speed-up of speculation{bounds(speedup)}"
        kind = "bad" if speedup["estimate"] < 1 else ""
        numbers.append((f"{speedup['estimate']:.2f}x", label, kind))
    if SPECULATIVE in arms:
        numbers.append((f"{arms[SPECULATIVE]['tokens_per_step']:.2f}", "tokens per step (β)", ""))
    numbers.append((f"{arms[best]['ttft_ms']:.0f} ms", "time to first token", ""))
    return numbers


def _losses(report: Json, base: Json | None) -> list[str]:
    """What went worse than plain decoding, in words."""
    lines = list[str]()
    for name, arm in report["arms"].items():
        if base is None or arm is base or name == PLAIN_STEP:  # which is there to compare bits
            continue
        speeds = arm["prompt_tokens_per_second"]
        slower = 0
        for speed, base_speed in zip(speeds, base["prompt_tokens_per_second"], strict=True):
            if speed and base_speed and speed < base_speed:
                slower += 1
        if slower:
            lines.append(
                f"{_words(name)} is slower than the fastest plain one "
                f"on {slower} of {len(speeds)} prompts"
            )
    if "bundle" in report:
        lines += differences(report)
    for name, reason in report.get("skipped", {}).items():
        lines.append(f"{name} was left out: {reason}")
    return lines


def _facts(report: Json) -> dict[str, str]:
    """How the numbers came about: setting, machine and versions."""
    machine = report["machine"]
    versions = {
        "ssdevice": report["ssdevice"],
        "Python": machine["python"],
        **report.get("versions", {}),
    }
    engines = sorted({arm["version"] for arm in report["arms"].values() if "version" in arm})
    used = [f"{name} {number}" for name, number in versions.items()]
    return {
        "measured": conditions(report),
        "bundle": described(report) if "bundle" in report else "",
        "system": machine["system"],
        "versions": ", ".join([*used, *engines]),
    }
