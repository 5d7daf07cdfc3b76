"""A bundle's plain answers held against those of another bundle of the same model, such as one for another target.

Both decode in plain decoding, each in its own engine. Where an answer parts, the logits of both are compared along it
up to there: the difference is a near-tie if plain's two best logits are at most twice as far apart as the largest
change of any logit between the bundles on rows that chose the same token, and that change is below the ceiling of the
coarser precision. Two quantizations of a model are two models: only between float32 bundles is anything else a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ssdevice.bench.equality import (
    CEILINGS,
    MARGIN_PROMPTS,
    Difference,
    Report,
    ShowsLogits,
    answer,
    first_difference,
)
from ssdevice.contract import PLAIN
from ssdevice.errors import InputError
from ssdevice.manifest import Manifest, Precision
from ssdevice.runtime.engines import Conversation, Engine
from ssdevice.runtime.loop import plain, plain_step, prefill

OTHER = "other bundle"


@dataclass
class Agreement:
    """``largest_change``: of any logit between the bundles on rows that chose the same token; None if not shown."""

    precisions: tuple[Precision, Precision]
    prompts: int
    differences: list[Difference] = field(default_factory=list)
    largest_change: float | None = None

    @property
    def ceiling(self) -> float:
        """What ``largest_change`` may be."""
        return max(CEILINGS[precision] for precision in self.precisions)

    @property
    def binding(self) -> bool:
        """Whether a difference that is no near-tie is a fault."""
        return all(precision is Precision.FP32 for precision in self.precisions)

    def near_tie(self, difference: Difference) -> bool:
        """Whether the margin at which a difference happened excuses it."""
        change, margin = self.largest_change, difference.margin
        return change is not None and margin is not None and change <= self.ceiling and margin <= 2 * change

    def faults(self) -> list[str]:
        """What is no near-tie between float32 bundles, one sentence each."""
        if not self.binding:
            return []
        found = []
        for d in self.differences:
            if not self.near_tie(d):
                why = "its margin was not measured" if d.margin is None else f"its margin is {d.margin:.3g}"
                found.append(
                    f"{d.arm}: prompt {d.prompt + 1} differs at token {d.position + 1} "
                    f"({d.found} instead of {d.expected}); no near-tie: {why}"
                )
        if self.largest_change is not None and self.largest_change > self.ceiling:
            found.append(
                f"a logit changes by {self.largest_change:.3g} between the bundles, at most {self.ceiling} may"
            )
        return found


def check_same_model(manifest: Manifest, other: Manifest) -> None:
    """Raise InputError for bundles that were made from different weights."""
    if manifest.model.sha256 != other.model.sha256:
        raise InputError(
            f"the other bundle is of another base: sha256 {other.model.sha256[:12]}, this one's is "
            f"{manifest.model.sha256[:12]}"
        )


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
    """Decode ``prompts`` with ``other`` and compare with ``answers``; ``mine``, ``other_shown``: with logits shown."""
    result = Agreement(precisions, len(prompts))
    conversation = other.new_conversation()
    advance = plain if PLAIN in other.functions else plain_step
    for number, (ids, expected) in enumerate(zip(prompts, answers, strict=True)):
        report("compare bundles", number, len(prompts), "")
        found = answer(conversation, ids, advance, stops, max_tokens)
        at, expect, token = first_difference(expected, found) if found != expected else (len(expected), -1, -1)
        margin = None
        if mine is not None and other_shown is not None and (found != expected or number < MARGIN_PROMPTS):
            led = [_led(engine, ids, expected[: at + 1]) for engine in (mine, other_shown)]
            change = float(np.abs(led[0][:at] - led[1][:at]).max(initial=0.0))
            result.largest_change = max(result.largest_change or 0.0, change)
            if at < len(led[0]):
                best = np.partition(led[0][at], -2)[-2:]
                margin = float(best[1] - best[0])
        if found != expected:
            result.differences.append(Difference(OTHER, number, at, expect, token, margin))
    report("compare bundles", len(prompts), len(prompts), "")
    return result


def _led(engine: Engine, ids: Sequence[int], truth: Sequence[int]) -> NDArray[np.float32]:
    """Logits ``[len(truth), vocab]`` from which plain decoding chooses each token of ``truth``, led along it."""
    conversation: Conversation = engine.new_conversation()
    advance = plain if PLAIN in engine.functions else plain_step
    conversation.length = 0
    if len(ids) > 1:
        prefill(conversation, ids[:-1])  # its last token again below: prefill itself shows no logits
    rows = []
    for root in (ids[-1], *truth[:-1]):
        advance(conversation, root)
        rows.append(cast(ShowsLogits, conversation).logits[0].copy())
        conversation.length += 1
    return np.stack(rows)
