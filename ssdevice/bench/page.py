"""A measurement as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ssdevice.bench.report import TITLES, Json, bounds, processor, prompts_of, title, why_not_valid
from ssdevice.config import write_json
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE

PAGE, DATA = "index.html", "report.json"
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 240, 48, 24
PLAIN_STEP = "plain_step"
"""Plain decoding through the step's graph, which is there to compare bits: that it is slower is no loss."""
COLORS = {"plain": "c0", PLAIN_STEP: "c1", SPECULATIVE: "c2", ADAPTIVE: "c3"}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --dim: #636c76; --line: #d0d7de; --paper: #fff; --bad: #b42318;
  --c0: #6e7781; --c1: #b58105; --c2: #1a7f5a; --c3: #0a62c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9198a1; --line: #3d444d; --paper: #14181d;
  --bad: #ff8a7a; --c0: #9198a1; --c1: #d9a520; --c2: #4cc38a; --c3: #6cb0ff; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .dim { color: var(--dim); } .bad { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .facts td { text-align: left; } .facts td { white-space: normal; }
th { color: var(--dim); font-weight: 500; }
.numbers { display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1.2rem 0; }
.numbers b { display: block; font-size: 1.9rem; line-height: 1.2; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 11px; } svg line { stroke: var(--line); }
code { overflow-wrap: anywhere; }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); }
.key { display: inline-block; margin-right: 1.2rem; } .key svg { width: .7rem; margin-right: .4rem; }
"""


def write_page(report: Json, folder: Path, command: Sequence[str]) -> None:
    """Write ``index.html`` and ``report.json`` into a folder, which is made. ``command``: the words that measured it.

    ``report``: from ``bench.report.as_json``, with another bundle's in ``beside``, or from ``peers.table.as_json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DATA, report)
    (folder / PAGE).write_text(page(report, command), "utf-8")


def page(report: Json, command: Sequence[str]) -> str:
    """The page as text."""
    beside = report.get("beside")
    reports = [report, *([beside["report"]] if beside else [])]
    body = "\n".join(_section(one) for one in reports) + (_beside(beside) if beside else "") + _origin(report, command)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_title(report))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _title(report: Json) -> str:
    if "bundle" not in report:
        return f"{Path(report['model']).name} beside other engines"
    return title(report, Path(report["bundle"]).name)


def _section(report: Json) -> str:
    parts = [f"<h1>{escape(_title(report))}</h1>", f'<p class="dim">{escape(prompts_of(report))}</p>']
    if not report["valid"]:
        parts.append(f'<p class="bad">Not valid: {why_not_valid(report)}</p>')
    parts += [_headline(report), _losses(report), "<h2>Ways to decode</h2>", _arms(report)]
    parts += ["<h2>Tokens per second by prompt</h2>", _prompts(report["arms"])]
    for name, arm in report["arms"].items():
        if arm.get("accepted_histogram"):
            parts += [
                "<h2>Accepted drafts per step</h2>",
                _histogram(arm["accepted_histogram"], COLORS.get(name, "c0")),
            ]
    return "\n".join(part for part in parts if part)


def _baseline(report: Json) -> Json | None:
    """The plain arm that others are compared with."""
    arm: Json | None = report["arms"].get(report.get("baseline") or report.get("fastest_plain_peer"))
    return arm


def _headline(report: Json) -> str:
    arms, speedup = report["arms"], report.get("speedup_interval")
    best = max(arms, key=lambda name: arms[name]["tokens_per_second"])
    numbers = [(f"{arms[best]['tokens_per_second']:.1f}", f"tokens/s, {TITLES.get(best, best)}", "")]
    if speedup is not None:
        label = f"speed-up of speculation{bounds(speedup)}"
        numbers.append((f"{speedup['estimate']:.2f}x", label, "bad" if speedup["estimate"] < 1 else ""))
    if SPECULATIVE in arms:
        numbers.append((f"{arms[SPECULATIVE]['tokens_per_step']:.2f}", "tokens per step (β)", ""))
    numbers.append((f"{arms[best]['ttft_ms']:.0f} ms", "time to first token", ""))
    shown = (f'<div class="{kind}"><b>{escape(n)}</b>{escape(label)}</div>' for n, label, kind in numbers)
    return f'<div class="numbers">{"".join(shown)}</div>'


def _losses(report: Json) -> str:
    """What went worse than plain decoding, in words."""
    lines = []
    base = _baseline(report)
    for name, arm in report["arms"].items():
        if base is None or arm is base or name == PLAIN_STEP:
            continue
        pairs = zip(arm["prompt_tokens_per_second"], base["prompt_tokens_per_second"], strict=True)
        slower = sum(mine < theirs for mine, theirs in pairs if mine and theirs)
        if slower:
            count = len(arm["prompt_tokens_per_second"])
            lines.append(
                f"{TITLES.get(name, name)} is slower than the fastest plain one on {slower} of {count} prompts"
            )
    for name, prompts in report.get("differing_prompts", {}).items():
        first = f"the first is prompt {min(prompts) + 1}"
        lines.append(f"{TITLES.get(name, name)} gave other tokens on {len(prompts)} prompts; {first}")
    lines += [f"{name} was left out: {reason}" for name, reason in report.get("skipped", {}).items()]
    equal = "<p>All ways to decode gave the same tokens on all prompts.</p>" if report.get("equal") else ""
    return "".join(f'<p class="bad">{escape(line)}.</p>' for line in lines) + equal


def _arms(report: Json) -> str:
    base = _baseline(report)
    head = ("", "tokens/s", "quartiles", "over plain", "β", "TTFT ms", "resident MB", "MB on disk")
    rows = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"]
    for name, arm in report["arms"].items():
        spread = arm["spread"]["tokens_per_second"]
        ratio = arm["tokens_per_second"] / base["tokens_per_second"] if base and base["tokens_per_second"] else None
        cells = [
            TITLES.get(name, name),
            f"{arm['tokens_per_second']:.1f}",
            f"{spread['q1']:.1f}..{spread['q3']:.1f}",
            f"{ratio:.2f}x" if ratio is not None else "",
            f"{arm['tokens_per_step']:.2f}",
            f"{arm['ttft_ms']:.1f}",
            f"{arm['resident_mb']:.0f}" if arm["resident_mb"] is not None else "",
            f"{arm.get('disk_mb', report.get('model_mb')):.1f}",
        ]
        loss = ' class="bad"' if ratio is not None and ratio < 1 and name != PLAIN_STEP else ""
        rows.append(f"<tr{loss}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _prompts(arms: Mapping[str, Json]) -> str:
    """A dot for each prompt and arm."""
    most = max((value or 0 for arm in arms.values() for value in arm["prompt_tokens_per_second"]), default=0) or 1
    count = max(len(arm["prompt_tokens_per_second"]) for arm in arms.values())
    dots, keys = [], []
    for number, (name, arm) in enumerate(arms.items()):
        title, color = TITLES.get(name, name), COLORS.get(name, f"c{number % len(COLORS)}")
        keys.append(
            f'<span class="key"><svg viewBox="0 0 10 10"><circle cx="5" cy="5" r="5" class="{color}"/></svg>'
            f"{escape(title)}</span>"
        )
        for at, value in enumerate(arm["prompt_tokens_per_second"]):
            if value is not None:
                x = LEFT + (WIDTH - LEFT) * (at + 0.5) / count
                said = escape(f"prompt {at + 1}, {title}: {value:.1f}")
                y = (HEIGHT - BOTTOM) * (1 - value / most / 1.05)
                dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{color}"><title>{said}</title></circle>')
    axis = [(f"{most * part:.0f}", (HEIGHT - BOTTOM) * (1 - part / 1.05)) for part in (0, 0.5, 1)]
    below = f'<text x="{LEFT}" y="{HEIGHT - 6}">prompts 1 to {count}</text>'
    return f"<p>{''.join(keys)}</p>{_plot(axis, [*dots, below])}"


def _histogram(counts: Sequence[int], color: str) -> str:
    """A bar for each number of drafts that a step accepted."""
    total, most = max(sum(counts), 1), max([*counts, 1])
    bars = []
    for drafts, number in enumerate(counts):
        x, width = LEFT + (WIDTH - LEFT) * drafts / len(counts), (WIDTH - LEFT) / len(counts)
        high = (HEIGHT - BOTTOM) * number / most / 1.15
        y = HEIGHT - BOTTOM - high
        middle = x + width / 2
        place = f'x="{x + width * 0.15:.1f}" y="{y:.1f}" width="{width * 0.7:.1f}" height="{high:.1f}"'
        bars.append(
            f'<rect {place} class="{color}"/>'
            f'<text x="{middle:.1f}" y="{y - 5:.1f}" text-anchor="middle">{number / total:.0%}</text>'
            f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{drafts}</text>'
        )
    return f'<p class="dim">Steps by the drafts they accepted, of {sum(counts)}.</p>{_plot([], bars)}'


def _plot(axis: Sequence[tuple[str, float]], parts: Sequence[str]) -> str:
    lines = [
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        for label, y in axis
    ]
    return f'<svg viewBox="0 -12 {WIDTH} {HEIGHT + 12}" role="img">{"".join([*lines, *parts])}</svg>'


def _beside(beside: Json) -> str:
    lines = []
    for name, ratio in beside["faster"].items():
        kind = ' class="bad"' if ratio["estimate"] < 1 else ""
        said = f"{TITLES.get(name, name)}: the first bundle is {ratio['estimate']:.2f}x as fast by token"
        lines.append(f"<p{kind}>{escape(said)}</p>")
    equal = f"Plain answers equal on {beside['equal_answers']} of {beside['prompts']} prompts."
    return f"<h2>First beside second</h2>{''.join(lines)}<p>{escape(equal)}</p>"


def _origin(report: Json, command: Sequence[str]) -> str:
    """How the numbers came about: command, machine, setting and versions."""
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
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows.items())
    shown = f"<p><code>{escape(shlex.join(command))}</code></p>"
    return f'<h2>How this was measured</h2>{shown}<table class="facts">{cells}</table>'
