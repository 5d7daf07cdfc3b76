"""The economics of many apps as JSON, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssdevice.bench.economics import Economics
from ssdevice.bench.plot import GREEN, GREY, INK
from ssdevice.errors import InputError, MissingExtraError

COLORS = ("#8250df", "#d29922", "#cf222e", "#0969da", "#bf3989")
OURS = "Speculative Streaming"


def as_json(economics: Economics, apps: int) -> dict[str, Any]:
    """One object: the base, and per method its bytes an app and its totals for 1, 2, .. ``apps`` apps."""
    return {
        "base": {
            "parameters": economics.base.parameters,
            "bytes": economics.base_bytes,
            "measured": economics.base_measured,
        },
        "lora_rank": economics.lora_rank,
        "bits": economics.bits,
        "apps": apps,
        "methods": [
            {
                "name": row.name,
                "extra_parameters": row.parameters,
                "extra_bytes": row.extra,
                "bytes_per_app": row.per_app,
                "measured": row.measured,
                "total_bytes": [economics.total(row, count) for count in range(1, apps + 1)],
            }
            for row in economics.rows
        ],
    }


def as_table(economics: Economics, apps: int) -> str:
    """The same as lines of text, with totals for a few counts up to ``apps``."""
    counts = sorted({1, *(count for count in (10,) if count < apps), apps})
    kind = "measured" if economics.base_measured else "computed"
    head = ["method", "beside the LoRA", "an app", *(f"{count} app{'s'[: count > 1]}" for count in counts)]
    lines = [head]
    for row in economics.rows:
        beside = readable(row.extra) if row.parameters is None else f"{row.parameters:.1e} = {readable(row.extra)}"
        totals = [readable(economics.total(row, count)) for count in counts]
        lines.append([row.name + (" (files)" if row.measured else ""), beside, readable(row.per_app), *totals])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join(
        [
            f"base: {economics.base.parameters:.3g} parameters, {readable(economics.base_bytes)} ({kind}); "
            f"computed apps: LoRA of rank {economics.lora_rank}, {economics.bits} bits a parameter",
            *shown,
        ]
    )


def readable(size: int) -> str:
    """Bytes in kB, MB or GB of powers of ten."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.{0 if size >= 100 * scale else 1 if size >= 10 * scale else 2}f} {unit}"
    return f"{size} B"


def plot(economics: Economics, apps: int, title: str, file: Path) -> None:
    """Write bytes on the device over the number of apps, a line a method, to an image whose kind its suffix says.

    Raises MissingExtraError without matplotlib, InputError for a file that cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtraError("bench", error.name or "matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    with matplotlib.rc_context(settings):
        figure, axis = pyplot.subplots(figsize=(10, 5.6))
        top = max(economics.total(row, apps) for row in economics.rows)
        scale, unit = (10**9, "GB") if top >= 10**9 else (10**6, "MB")
        counts = range(1, apps + 1)
        axis.axhline(2 * economics.base_bytes / scale, color=GREY, linestyle=":", linewidth=1.5)
        axis.annotate(
            "twice the base", (1, 2 * economics.base_bytes / scale), (4, 0), textcoords="offset points",
            xycoords=("axes fraction", "data"), color="#6e7781", fontsize=9, va="center", annotation_clip=False,
        )  # fmt: skip
        others = iter(COLORS * (1 + len(economics.rows) // len(COLORS)))
        # The dearest first, so that the legend stands as the lines do.
        for row in sorted(economics.rows, key=lambda row: -row.per_app):
            ours = row.name.startswith(OURS) or row.measured
            values = [economics.total(row, count) / scale for count in counts]
            style = "--" if row.measured else "-"
            color = GREEN if ours else (GREY if row.parameters == 0 else next(others))
            label = f"{row.name}{' (files)' if row.measured else ''}: {readable(row.per_app)} an app"
            axis.plot(counts, values, style, color=color, label=label, linewidth=2.4 if ours else 1.8)
        axis.set_xlim(1, max(apps, 2))
        axis.set_ylim(0, top / scale * 1.05)
        axis.set_xlabel("apps on one base")
        axis.set_ylabel(f"{unit} on the device")
        axis.set_title(title, loc="left", fontweight="bold")
        axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.94))
        figure.tight_layout()
        try:
            figure.savefig(file, dpi=160)
        except (OSError, ValueError) as error:
            raise InputError(f"--plot {file}: cannot be written ({error})") from error
        finally:
            pyplot.close(figure)
