"""Plain answers of two bundles of one model: what parts is found, and is a near-tie only by its
margin.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ssdevice.bench.equality import Asked, Difference, coarser
from ssdevice.bench.modes import Agreement, against_bundle, answer
from ssdevice.bundle.manifest import Precision
from ssdevice.export.onnx.graphs import LogitsEngine
from ssdevice.runtime.engine import EngineOptions
from tests.commands.test_run import call
from tests.runtime import tiny_bundle as tiny

PROMPTS = [[3, 4, 5], [6], [7, 8]]
ASKED = Asked(PROMPTS, (), 12, Precision.FP32, lambda *_: None)


def compared(answers: list[list[int]], precision: Precision = Precision.FP32) -> Agreement:
    engines = [
        LogitsEngine.of(tiny.tiny_bundle("fp32"), None, EngineOptions(threads=1)) for _ in range(3)
    ]
    return against_bundle(
        engines[0], engines[1], engines[2], replace(ASKED, precision=precision), answers
    )


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    from ssdevice.runtime.loop import plain

    conversation = LogitsEngine.of(
        tiny.tiny_bundle("fp32"), None, EngineOptions(threads=1)
    ).new_conversation()
    return [answer(conversation, ids, plain, (), 12) for ids in PROMPTS]


def test_a_bundle_agrees_with_itself_to_the_bit(answers: list[list[int]]) -> None:
    result = compared(answers)
    assert result.differences == [] and result.largest_change == 0.0 and result.faults() == []


@pytest.mark.parametrize("at", [0, 5])
def test_another_token_is_no_near_tie_unless_its_logit_is_near(
    answers: list[list[int]], at: int
) -> None:
    changed = [list(tokens) for tokens in answers]
    changed[2][at] = (changed[2][at] + 1) % 50
    result = compared(changed)
    (found,) = result.differences
    assert (found.prompt, found.position, found.expected, found.found) == (
        2,
        at,
        changed[2][at],
        answers[2][at],
    )
    assert found.margin is not None and found.margin > 0
    assert len(result.faults()) == 1 and "not a near-tie" in result.faults()[0]


def test_answers_are_compared_as_far_as_the_other_context_holds_them(
    answers: list[list[int]],
) -> None:
    full = tiny.tiny_bundle("fp32").geometry
    engines = [
        LogitsEngine.of(tiny.tiny_bundle("fp32"), None, EngineOptions(threads=1)) for _ in range(3)
    ]
    engines[1].geometry = replace(full, context=10)
    result = against_bundle(*engines, ASKED, answers)
    assert result.differences == [] and result.faults() == []


def agreement(change: float, margin: float, precision: Precision) -> Agreement:
    differences = [Difference("other bundle", 0, 3, 1, 2, margin)]
    return Agreement(precision, 200, differences, change)


def test_only_between_float32_bundles_is_a_difference_a_fault() -> None:
    assert agreement(1e-4, 1.9e-4, Precision.FP32).faults() == []
    assert len(agreement(1e-4, 2.1e-4, Precision.FP32).faults()) == 1
    assert (
        len(agreement(2e-3, 1e-5, Precision.FP32).faults()) == 2
    )  # beyond the ceiling: nothing is excused
    assert agreement(0.4, 3.0, Precision.INT8).faults() == []


def test_of_two_precisions_the_coarser_counts(answers: list[list[int]]) -> None:
    for precisions in ((Precision.FP32, Precision.INT8), (Precision.INT8, Precision.FP32)):
        assert compared(answers, coarser(*precisions)).precision is Precision.INT8


def test_a_bundle_of_another_base_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tiny.tiny_bundle("fp32")
    other = tiny.bundle_of_another_base(tmp_path / "other")
    assert call("verify", str(mine.folder), "--against", str(other), "--threads", "1") == 2
    assert f"the base of --against {other} is not the base of" in capsys.readouterr().err


@pytest.mark.wide
def test_verify_reports_both_bundles(capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = (str(tiny.tiny_bundle(quant).folder) for quant in ("fp32", "int8"))
    few = ("--limit", "2", "--max-tokens", "6", "--threads", "1")
    assert call("verify", mine, "--against", other, *few) == 0
    assert "other bundle 2" in capsys.readouterr().out
    assert call("verify", mine, "--against", mine, *few, "--json") == 0
    found = json.loads(capsys.readouterr().out)["against"]
    assert found["differences"] == [] and found["largest_logit_change"] == 0.0
