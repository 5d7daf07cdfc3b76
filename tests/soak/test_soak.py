"""A hundred generations over three bundles: the short form of ``make soak``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ssdevice.runtime.loop import Reason
from tests.runtime import tiny_bundle as tiny
from tests.soak.questions import Answer, Question, fresh_answers
from tests.soak.soaking import KINDS, MAX_GROWTH_MB, Outcome, Script, soak

COUNT = 100
WORDS = ("abc def", "what is the weather", "a")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the size of the process is read from /proc"
)


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    made = {
        "fp32": tiny.tiny_bundle("fp32"),
        "int8": tiny.tiny_bundle("int8"),
        "plain": tiny.tiny_bundle("fp32", streams=False),
    }
    return {name: bundle.folder for name, bundle in made.items()}


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(
        {app: WORDS for app in ("fp32", "int8", "plain")},
        dict.fromkeys(("fp32", "int8", "plain"), "x" * 70),
        "x" * 200,
    )


@pytest.fixture(scope="module")
def fresh(folders: dict[str, Path], script: Script) -> dict[Question, Answer]:
    return fresh_answers(folders, script.questions, processes=2)


@pytest.mark.wide
def test_no_answer_depends_on_those_before(
    folders: dict[str, Path], script: Script, fresh: dict[Question, Answer]
) -> None:
    outcome = soak(folders, script, fresh, seed=3, count=COUNT)
    assert not outcome.differences, outcome.differences[0]
    assert outcome.growth_mb <= MAX_GROWTH_MB
    assert outcome.kinds.total() == COUNT and set(outcome.kinds) == set(KINDS)
    assert {Reason.MAX_TOKENS, Reason.CONTEXT, Reason.CANCELLED} <= set(outcome.reasons)


@pytest.mark.wide
def test_a_wrong_answer_is_found(
    folders: dict[str, Path], script: Script, fresh: dict[Question, Answer]
) -> None:
    wrong = {
        question: Answer((*answer.tokens[:2], -1), answer.reason)
        for question, answer in fresh.items()
    }
    assert soak(folders, script, wrong, seed=3, count=20).differences


def test_growth_is_from_after_the_warm_up_to_the_end() -> None:
    assert Outcome(resident_mb=[50.0] * 10 + [100.0] * 90).growth_mb == 0
    assert Outcome(resident_mb=[float(size) for size in range(100)]).growth_mb == 81.0
