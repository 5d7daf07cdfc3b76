"""Two bundles measured in one run on the same prompts: which is faster, and whether their answers are equal."""

from __future__ import annotations

from dataclasses import asdict

from ssdevice.bench.report import TITLES, Json, bounds
from ssdevice.bench.runner import BenchResult, Measured
from ssdevice.bench.statistics import Interval, speedup
from ssdevice.errors import InputError
from ssdevice.runtime.loop import SPECULATIVE


def compare(mine: BenchResult, other: BenchResult) -> Json:
    """Decoding time of the other bundle over that of this one by mode (2: this one takes half), and equal answers.

    ``equal_answers``: prompts whose plain answers have the same tokens. Raises InputError if nothing can be compared.
    """
    ratios = {name: by_token(mode, other.modes[name]) for name, mode in mine.modes.items() if name in other.modes}
    faster = {name: asdict(ratio) for name, ratio in ratios.items() if ratio is not None}
    if not faster:
        raise InputError("no decoding mode took a step in both bundles")
    answers = [next(iter(result.modes.values())).answers for result in (mine, other)]
    return {
        "faster": faster,
        "equal_answers": sum(a.tokens == b.tokens for a, b in zip(*answers, strict=True)),
        "prompts": len(answers[0]),
    }


def by_token(mine: Measured, theirs: Measured) -> Interval | None:
    """Time of theirs over time of mine per emitted token; None if no prompt took a step in both.

    Answers may differ, so tokens are compared and not answers, prompt by prompt.
    """
    pairs = [
        (b.decode_seconds / sum(b.accepted), a.decode_seconds / sum(a.accepted))
        for my_round, their_round in zip(mine.rounds, theirs.rounds, strict=True)
        for a, b in zip(my_round, their_round, strict=True)
        if a.steps and b.steps
    ]
    return speedup([b for b, _ in pairs], [a for _, a in pairs]) if pairs else None


def as_markdown(found: Json, mine: str, other: str) -> str:
    """The result of ``compare`` with the names of the bundles."""
    lines = [f"## {mine} beside {other}", ""]
    for name in (*[name for name in found["faster"] if name != SPECULATIVE], SPECULATIVE):
        if name in found["faster"]:
            ratio = found["faster"][name]
            lines.append(f"- {TITLES[name]}: {ratio['estimate']:.2f}x as fast by token{bounds(ratio)}")
    lines.append(f"- plain answers equal on {found['equal_answers']} of {found['prompts']} prompts")
    return "\n".join(lines)
