"""The promise of equal tokens: what breaks it is found, and a near-tie is excused only by its
margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ssdevice.bench.equality import Answer, Asked, Comparison, Difference
from ssdevice.bench.modes import FORCED, compare_modes, led
from ssdevice.bundle.manifest import Precision
from ssdevice.contract import COUNT, STEP, STEP_SHORT, TOKENS
from ssdevice.errors import BundleError
from ssdevice.runtime.conversation import Conversation
from ssdevice.tree import Tree
from tests.runtime.scripted import ScriptedCache, ScriptedEngine, make_geometry, random_drafter

TREE = Tree.of([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
PROMPTS = [[1, 2, 3], [4], [5, 6]]


class Leaky(ScriptedCache):
    """A step that is wrong only when it accepts two drafts or more."""

    def step(self, last: int, function: str = STEP) -> dict[str, Any]:
        out = super().step(last, function)
        (count,) = out[COUNT]
        if count > 2:
            out[TOKENS][count - 1] = (out[TOKENS][count - 1] + 1) % self.geometry.vocab
        return out


class Short(ScriptedCache):
    """A short step that is wrong when it accepts a draft."""

    def step(self, last: int, function: str = STEP) -> dict[str, Any]:
        out = super().step(last, function)
        if function == STEP_SHORT and out[COUNT] > [1]:
            out[TOKENS][0] = (out[TOKENS][0] + 1) % self.geometry.vocab
        return out


class Forgetful(ScriptedCache):
    """A step that commits the wrong row when it accepts a draft."""

    def write(self, rows: Sequence[int]) -> None:
        super().write([rows[0], *[(row + 1) % self.geometry.vocab for row in rows[1:]]])


def run(
    kind: type[ScriptedCache], precision: Precision = Precision.FP32, short: int = 0
) -> Comparison:
    engine = ScriptedEngine(
        make_geometry(TREE, context=90, short=short), random_drafter(0, 0.0), kind
    )
    return compare_modes(engine, None, Asked(PROMPTS, (), 40, precision, lambda *_: None))


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_right_step_has_no_faults_and_ends_everywhere(short: int) -> None:
    result = run(ScriptedCache, short=short)
    assert result.modes == ["plain_step", "speculative", FORCED]
    assert result.faults() == [] and result.nodes_ended == set(range(TREE.size))


@pytest.mark.parametrize(("kind", "short"), [(Leaky, 0), (Forgetful, 0), (Short, 2)])
def test_planted_drafts_find_faults_that_own_drafts_never_reach(
    kind: type[ScriptedCache], short: int
) -> None:
    result = run(kind, short=short)
    assert {d.arm for d in result.differences} >= {FORCED}
    assert any("forced" in fault and "not a near-tie" in fault for fault in result.faults())


def equality(
    precision: Precision, change: float | None, *margins: float | None, prompts: int = 1000
) -> Comparison:
    result = Comparison(precision, prompts, modes=[FORCED], largest_change=change)
    result.differences = [
        Difference(FORCED, i, 3, 1, 2, margin) for i, margin in enumerate(margins)
    ]
    return result


def test_a_near_tie_is_at_most_twice_the_largest_change() -> None:
    assert equality(Precision.INT8, 0.09, 0.17).faults() == []
    assert len(equality(Precision.INT8, 0.09, 0.19).faults()) == 1


def test_a_margin_is_the_distance_of_both_tokens_and_a_change_that_of_rows_that_agree() -> None:
    mine = np.array([[1, 0, 0], [2.0, 1.9, 0], [0, 0, 1]], np.float32)
    theirs = np.array([[1, 0.06, 0], [1.5, 2.5, 0], [0, 0, 0.9]], np.float32)
    result = Comparison(Precision.INT8, 1)
    result.add(0, FORCED, Answer([0, 0, 2], lambda: mine), Answer([0, 1, 2], lambda: theirs))
    (found,) = result.differences
    assert (found.position, found.expected, found.found) == (1, 0, 1)
    assert found.margin == pytest.approx(0.1) and result.largest_change == pytest.approx(0.1)
    assert result.near_tie(found)


def test_an_answer_that_ends_early_is_no_near_tie() -> None:
    rows = np.zeros((2, 3), np.float32)
    result = Comparison(Precision.INT8, 1)
    result.add(0, FORCED, Answer([0, 0], lambda: rows), Answer([0], lambda: rows))
    assert [d.margin for d in result.differences] == [None] and result.faults()


def test_a_change_beyond_the_ceiling_excuses_nothing() -> None:
    faults = equality(Precision.INT8, 0.9, 0.1).faults()
    assert len(faults) == 2 and "at most 0.5 may" in faults[1]


def test_a_margin_that_was_not_measured_excuses_nothing() -> None:
    assert "was not measured" in equality(Precision.INT8, None, None).faults()[0]


def test_even_near_ties_are_few_and_none_in_fp32() -> None:
    assert equality(Precision.INT8, 0.09, *[0.1] * 5).faults() == []
    assert (
        "6 of 1000 prompts differ, at most 5 may"
        in equality(Precision.INT8, 0.09, *[0.1] * 6).faults()[0]
    )
    assert "at most 0 may" in equality(Precision.FP32, 1e-5, 1e-6).faults()[0]


def test_logits_that_are_not_numbers_are_a_fault() -> None:
    class Broken:
        """A conversation whose logits are NaN."""

        engine = SimpleNamespace(source="bundle")
        length = 0
        logits = np.full((1, 4), np.nan, np.float32)

    with pytest.raises(BundleError, match="logits are not finite"):
        led(cast(Conversation, Broken()), [], [1, 2, 3], lambda *_: [2])
