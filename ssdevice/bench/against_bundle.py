"""Compares a bundle's plain answers with those of another bundle of the same model, such as one for another target.

Two quantizations of a model are two models, so differences that are not near-ties are faults only in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from ssdevice.bench.equality import CEILINGS, Answer, Comparison, compare
from ssdevice.bench.modes import Greedy, plain_of, shown_rows
from ssdevice.bundle.manifest import Precision
from ssdevice.progress import Report
from ssdevice.runtime.engine import Engine

OTHER = "other bundle"


class Agreement(Comparison):
    """The result of ``against_bundle``."""

    def faults(self) -> list[str]:
        """Those of a comparison between float32 bundles; none for other precisions."""
        return super().faults() if self.precision is Precision.FP32 else []


def against_bundle(
    mine: Engine | None,
    other: Engine,
    other_shown: Engine | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[list[int]],
    stops: Sequence[int],
    max_tokens: int,
    precisions: tuple[Precision, Precision],
    report: Report,
) -> Agreement:
    """Decode ``prompts`` with ``other`` and compare with ``answers``, as far as its context holds them.

    ``mine`` and ``other_shown`` show logits. Raises ContextOverflowError for a prompt that is longer than the context.
    """
    base, room = plain_of(other), other.geometry.context + 1
    decode = Greedy(other.new_conversation(), other_shown, stops, max_tokens, base)

    def given(case: tuple[Sequence[int], list[int]], _: Sequence[int]) -> Answer:
        ids, tokens = case[0], case[1][: room - len(case[0])]
        return Answer(tokens, lambda: shown_rows(mine, ids, tokens, plain_of(mine) if mine else base))

    coarser = max(precisions, key=lambda precision: CEILINGS[precision])
    result = Agreement(coarser, len(prompts), between="the bundles", what="to those of this bundle")
    cases = list(zip(prompts, answers, strict=True))
    others = {OTHER: lambda case, expected: decode(case[0], expected)}
    return compare(result, "compare bundles", cases, given, others, report)
