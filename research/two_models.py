"""Streams beside a draft model by cost: the first paper's figure 4 (equation 6), the successor's 20 (equation 10).

    python -m research.two_models --plain 3.32 --verify 4.85 --streams 5.7 --gamma 4 --out FOLDER

A step with a draft model costs γ of its calls and the target's own, and emits ζ tokens; a step with streams costs C_ss
and emits β. The papers set C_ss = C_target. On a CPU a call of several rows costs more than one of a single row, and
so do streams: give the milliseconds of one token, of a step that verifies γ drafts, and of a step with streams. Prints
how much faster streams are by ζ / β and the cost of a token on both models, and draws ``two-models.svg``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from research.figures import plot
from ssdevice.bench import report

SHARES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
"""ζ / β."""
RATIOS = (2, 4, 6, 8, 10, 12, 14, 16)
"""C_target / C_draft, both of one token."""


def faster(
    share: float, ratio: float, gamma: int, verify: float = 1.0, streams: float = 1.0
) -> float:
    """How much faster streams are than a draft model. ``verify``, ``streams``: costs of a step in those of a token."""
    return (gamma / ratio + verify) / streams / share


def even(ratio: float, gamma: int, verify: float = 1.0, streams: float = 1.0) -> float:
    """ζ / β where both are as fast."""
    return faster(1.0, ratio, gamma, verify, streams)


def main(words: Sequence[str] | None = None) -> None:
    """Print both tables and draw both sets of lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--plain", "--verify", "--streams"):
        parser.add_argument(name, type=float, required=True, help="milliseconds")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    measured = args.verify / args.plain, args.streams / args.plain
    lines, rows = {}, []
    for name, costs in {"as the papers": (1.0, 1.0), "measured": measured}.items():
        for share in SHARES:
            found = [faster(share, ratio, args.gamma, *costs) for ratio in RATIOS]
            lines[f"ζ/β {share}, {name}"] = found
            rows.append([name, f"{share}", *(f"{value:.2f}" for value in found)])
        rows.append(
            [name, "even at", *(f"{even(ratio, args.gamma, *costs):.2f}" for ratio in RATIOS)]
        )
    print("\n".join(report.table(["costs", "ζ/β", *map(str, RATIOS)], *rows)).strip())
    args.out.mkdir(parents=True, exist_ok=True)
    title = "Streams over a draft model, by C_target / C_draft"
    (args.out / "two-models.svg").write_text(plot(title, lines, RATIOS))


if __name__ == "__main__":
    main()
