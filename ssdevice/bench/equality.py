"""The one comparison of answers, and the rule that tells a near-tie from a fault.

It compares the decoding modes of a bundle and two bundles (``bench.modes``), and sampled answers
(``bench.sampled``).

Sums over differently placed rows are not bit-equal, so two candidates with nearly tied logits may
swap. A difference is a near-tie if the logits of both tokens, at the first differing place, are at
most twice as far apart as the largest change of any logit on rows of the same text that chose the
same token, and if that change is below the ceiling of the precision. Anything else is a fault.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ssdevice.bundle.manifest import Precision
from ssdevice.progress import Report, track

MARGIN_PROMPTS = 2
"""Prompts whose logits are compared even if all answers agree.

So the largest change is always known.
"""
MOST = {
    Precision.FP32: 1e-3,
    Precision.FP16: 0.1,
    Precision.INT8: 0.5,
    Precision.INT4: 0.5,
    Precision.PALETTE4: 0.5,
}
"""Largest allowed change of a logit, by precision, fixed before any run."""
DIFFERING_SHARE = 0.005
"""Share of a mode's prompts that may differ by near-ties; none in fp32."""
NOT_MEASURED = (
    "not measured; the onnx package shows them for ONNX bundles (pip install 'ssdevice[export]'), "
    "ExecuTorch programs if they were exported with --logits"
)

Rows = NDArray[np.float32]


@dataclass
class Answer:
    """The tokens of an answer.

    ``show`` gives the logits ``[n, vocab]`` that the expected tokens were, or would be, chosen
    from; None if nothing shows them. ``logprobs``: of sampled tokens.
    """

    tokens: list[int]
    show: Callable[[], Rows | None]
    logprobs: list[float] = field(default_factory=list)

    @cached_property
    def rows(self) -> Rows | None:
        """What ``show`` gives, computed once."""
        return self.show()


@dataclass(frozen=True)
class Asked:
    """What every mode answers: ``prompts`` of token ids.

    An answer has at most ``max_tokens``, and ends with one of ``stop_ids``. ``precision``: of the
    bundle that answers.
    """

    prompts: Sequence[Sequence[int]]
    stop_ids: Sequence[int]
    max_tokens: int
    precision: Precision
    report: Report


Answerer = Callable[[Any, Sequence[int]], Answer]
"""``(case, expected) -> Answer``.

``expected``: the tokens it is compared with, empty for the reference itself.
"""


@dataclass(frozen=True)
class Difference:
    """Where an answer first differs from the expected one.

    ``margin``: distance of both tokens' logits; None if not measured.
    """

    arm: str
    prompt: int
    position: int
    expected: int
    found: int
    margin: float | None = None


@dataclass
class Comparison:
    """Answers compared with a reference's, and the rule that excuses near-ties.

    - ``precision``: of the bundle, or the coarser of two.
    - ``largest_change``: of any logit; None without logits.
    - ``modes``: what is compared; ``between``: in words.
    - ``nodes_ended``: of the tree's ``nodes``, those at which an accepted run ended.
    - ``answers``: the reference's tokens by prompt.
    """

    precision: Precision
    prompts: int
    differences: list[Difference] = field(default_factory=list)
    largest_change: float | None = None
    modes: list[str] = field(default_factory=list)
    between: str = "modes"
    nodes_ended: set[int] = field(default_factory=set)
    nodes: int = 1
    answers: list[list[int]] = field(default_factory=list)

    @property
    def ceiling(self) -> float:
        """The largest allowed change of a logit."""
        return MOST[self.precision]

    def compare(
        self,
        stage: str,
        cases: Sequence[Any],
        reference: Answerer,
        others: Mapping[str, Answerer],
        report: Report,
    ) -> Self:
        """Answer every case by the reference, then by each of the others, and add all differences.

        A case is mostly a prompt.
        """
        self.prompts = len(cases)
        self.modes = list(others)
        for number, case in enumerate(track(report, stage, cases)):
            expected = reference(case, [])
            self.answers.append(expected.tokens)
            for mode, other in others.items():
                self.add(number, mode, expected, other(case, expected.tokens))
        return self

    @property
    def differing(self) -> dict[str, int]:
        """By mode: prompts with other answers."""
        counts = Counter(difference.arm for difference in self.differences)
        return {mode: counts[mode] for mode in self.modes}

    def add(self, number: int, mode: str, expected: Answer, found: Answer) -> None:
        """Compare an answer to prompt ``number``, from 0, with the expected one."""
        differs = found.tokens != expected.tokens
        if not differs and number >= MARGIN_PROMPTS:
            return
        reference = expected.rows
        rows = found.rows
        if reference is not None and rows is not None:
            both = min(len(reference), len(rows))
            agree = reference[:both].argmax(1) == rows[:both].argmax(1)
            changes = np.abs(reference[:both] - rows[:both])[agree]
            self.largest_change = max(self.largest_change or 0.0, float(changes.max(initial=0.0)))
        if differs:
            at, one, other = first_difference(expected.tokens, found.tokens)
            if reference is not None:
                rows = reference
            margin = None
            if rows is not None and at < len(rows) and min(one, other) >= 0:
                margin = float(abs(rows[at, one] - rows[at, other]))
            self.differences.append(Difference(mode, number, at, one, other, margin))

    def near_tie(self, difference: Difference) -> bool:
        """Whether the margin of a difference excuses it."""
        change = self.largest_change
        margin = difference.margin
        if change is None or margin is None:
            return False
        return change <= self.ceiling and margin <= 2 * change

    def as_json(self) -> dict[str, Any]:
        """The comparison as ``verify --json`` writes it."""
        found: dict[str, Any] = {
            "prompts": self.prompts,
            "equal": {mode: self.prompts - differing for mode, differing in self.differing.items()},
            "largest_logit_change": self.largest_change,
            "ceiling": self.ceiling,
            "differences": [
                {**vars(difference), "near_tie": self.near_tie(difference)}
                for difference in self.differences
            ],
            "tokens": sum(len(tokens) for tokens in self.answers),
            "nodes": self.nodes,
            "nodes_ended": len(self.nodes_ended),
        }
        if self.modes and self.largest_change is None:
            found["logits"] = NOT_MEASURED
        return found

    def faults(self) -> list[str]:
        """What breaks the promise of equal answers, one sentence each.

        These are differences that nothing excuses, and too many differing prompts: none may differ
        in fp32, otherwise 0.5 % of a mode's prompts but at least one.
        """
        allowed = 0
        if self.precision is not Precision.FP32:
            allowed = max(1, int(self.prompts * DIFFERING_SHARE))
        found = self.unexcused()
        for mode, differing in self.differing.items():
            if differing > allowed:
                found.append(
                    f"{mode}: {differing} of {self.prompts} prompts differ, at most {allowed} may"
                )
        return found

    def unexcused(self) -> list[str]:
        """Differences that are no near-ties, and a change beyond the ceiling, one sentence each."""
        found = []
        for d in self.differences:
            if self.near_tie(d):
                continue
            why = "its margin was not measured"
            if d.margin is not None:
                why = f"its margin is {d.margin:.3g}"
            found.append(
                f"{d.arm}: prompt {d.prompt + 1} differs at token {d.position + 1} "
                f"({d.found} instead of {d.expected}); not a near-tie: {why}"
            )
        change = self.largest_change
        if change is not None and change > self.ceiling:
            found.append(
                f"a logit changes by {change:.3g} between {self.between}, "
                f"at most {self.ceiling} may"
            )
        return found


def first_difference(expected: Sequence[int], found: Sequence[int]) -> tuple[int, int, int]:
    """The first position at which two answers differ, and both tokens there.

    A token is -1 where an answer has ended.
    """
    for at, (one, other) in enumerate(zip_longest(expected, found, fillvalue=-1)):
        if one != other:
            return at, one, other
    return len(expected), -1, -1


def coarser(*precisions: Precision) -> Precision:
    """The one of several precisions whose logits may change most."""
    return max(precisions, key=MOST.__getitem__)
