"""A measurement as a picture: the speed of each mode, and how many tokens steps emitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssdevice.bench.report import TITLES, Json, title
from ssdevice.errors import InputError, needs_extra
from ssdevice.runtime.loop import SPECULATIVE

GREY, GREEN, INK = "#b8bec6", "#2a9d6f", "#24292f"


def check_plot(file: Path) -> None:
    """Raise MissingExtraError without matplotlib, InputError for a suffix that it cannot write."""
    with needs_extra("bench"):
        from matplotlib.figure import Figure
    suffixes = sorted(Figure().canvas.get_supported_filetypes())
    if file.suffix[1:].lower() not in suffixes:
        raise InputError(f"--plot {file}: a picture's name ends in one of .{', .'.join(suffixes)}")


def plot(report: Json, file: Path) -> None:
    """Write the report of ``ssdevice.bench.report.as_json`` to an image in the format of its suffix.

    Call ``check_plot`` before the measurement. Raises InputError for a file that cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}
    settings |= dict.fromkeys(("axes.edgecolor", "text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with matplotlib.rc_context(settings):
        speculative = report["arms"].get(SPECULATIVE)
        pictures = 2 if speculative else 1
        figure, axes = pyplot.subplots(1, pictures, figsize=(6 * pictures, 4.8), squeeze=False)
        _speed(axes[0][0], report)
        if speculative:
            _histogram(axes[0][1], speculative)
        words = title(report, Path(report["bundle"]).name)
        if not report["valid"]:
            words += "  (machine was loaded: not valid)"
        figure.suptitle(words, x=0.01, ha="left", fontweight="bold")
        figure.text(0.01, 0.01, f"{report['prompts']} prompts, {report['machine']['cpu']}", fontsize=9, color="#6e7781")
        figure.tight_layout(rect=(0, 0.03, 1, 0.97))
        try:
            figure.savefig(file, dpi=160)
        except (OSError, ValueError) as error:
            raise InputError(f"--plot {file}: cannot be written ({error})") from error
        finally:
            pyplot.close(figure)


def _speed(axis: Any, report: Json) -> None:
    modes = report["arms"]
    names = list(modes)
    values = [modes[name]["tokens_per_second"] for name in names]
    rounds = [modes[name]["spread"]["tokens_per_second"] for name in names]
    spreads = [
        [max(value - r["q1"], 0) for value, r in zip(values, rounds, strict=True)],
        [max(r["q3"] - value, 0) for value, r in zip(values, rounds, strict=True)],
    ]
    colors = [GREEN if name == SPECULATIVE else GREY for name in names]
    labels = [TITLES[name].replace(" (", "\n(") for name in names]
    bars = axis.bar(labels, values, color=colors, width=0.62, yerr=spreads, capsize=4, ecolor=INK)
    axis.bar_label(bars, fmt="%.1f", padding=6)
    axis.set_ylabel("tokens per second")
    axis.set_ylim(0, max([*values, 1e-9]) * 1.18)
    heading = f"Decoding speed: {report['speedup']:.2f}x" if report["speedup"] else "Decoding speed"
    axis.set_title(heading, loc="left")


def _histogram(axis: Any, mode: Json) -> None:
    histogram = mode["accepted_histogram"]
    total = max(sum(histogram), 1)
    shares = [count / total * 100 for count in histogram]
    bars = axis.bar(range(1, len(shares) + 1), shares, color=GREEN, width=0.7)
    axis.bar_label(bars, fmt="%.0f %%", padding=4)
    axis.set_xticks(range(1, len(shares) + 1))
    axis.set_xlabel("tokens a step emitted")
    axis.set_ylabel("% of steps")
    axis.set_ylim(0, max([*shares, 1e-9]) * 1.18)
    axis.set_title(f"{mode['tokens_per_step']:.2f} tokens per step", loc="left")
