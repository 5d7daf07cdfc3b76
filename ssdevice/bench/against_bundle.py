"""Compares a bundle's plain answers with those of another bundle of the same model, such as one for another target.

Both bundles decode plainly, each in its own engine. If an answer differs, the logits of both are compared up to the
first difference. The difference is a near-tie if the two best logits are at most twice as far apart as the largest
change of any logit between the bundles on rows that chose the same token, and that change is below the ceiling of the
coarser precision. Two quantizations of a model are two models, so other differences are faults only in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssdevice.bench.equality import (
    CEILINGS,
    MARGIN_PROMPTS,
    Comparison,
    Difference,
    answer,
    first_difference,
    led,
    plain_of,
)
from ssdevice.bundle.manifest import Precision
from ssdevice.progress import Report, track
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
    answers: Sequence[Sequence[int]],
    stops: Sequence[int],
    max_tokens: int,
    precisions: tuple[Precision, Precision],
    report: Report,
) -> Agreement:
    """Decode ``prompts`` with ``other`` and compare with ``answers``, as far as its context holds them.

    ``mine`` and ``other_shown`` show logits. Raises ContextOverflowError for a prompt that is longer than the context.
    """
    coarser = max(precisions, key=lambda precision: CEILINGS[precision])
    result = Agreement(coarser, len(prompts), between="the bundles")
    conversation = other.new_conversation()
    advance = plain_of(other)
    pairs = list(zip(prompts, answers, strict=True))
    for number, (ids, expected) in enumerate(track(report, "compare bundles", pairs)):
        room = other.geometry.context + 1 - len(ids)  # its context may be smaller
        found, expected = answer(conversation, ids, advance, stops, max_tokens)[:room], expected[:room]
        at, expect, token = first_difference(expected, found) if found != expected else (len(expected), -1, -1)
        margin = None
        if mine is not None and other_shown is not None and (found != expected or number < MARGIN_PROMPTS):
            # The last prompt token is decoded, because prefill shows no logits.
            truth = [ids[-1], *expected[: at + 1]]
            rows = [led(engine.new_conversation(), ids[:-1], truth, plain_of(engine)) for engine in (mine, other_shown)]
            change = float(np.abs(rows[0][:at] - rows[1][:at]).max(initial=0.0))
            result.largest_change = max(result.largest_change or 0.0, change)
            if at < len(rows[0]):
                best = np.partition(rows[0][at], -2)[-2:]
                margin = float(best[1] - best[0])
        if found != expected:
            result.differences.append(Difference(OTHER, number, at, expect, token, margin))
    return result
