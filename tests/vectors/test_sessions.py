"""The sessions that hosts in other languages repeat are what Python's loop does."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from typing import Any

import pytest

from ssdevice.contract import DRAFT, PLAIN, PREFILL, STEP, VERIFY
from ssdevice.runtime.adaptive import SHORT
from tests.vectors.sessions import FILE, record, text

HOW = "python -m tests.vectors writes them again"


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """Those of all sessions."""
    return [
        answer
        for session in json.loads(FILE.read_text("utf-8"))["sessions"]
        for answer in session["answers"]
    ]


def test_the_sessions_are_what_python_does() -> None:
    stored = json.loads(FILE.read_text("utf-8"))
    found = json.loads(text(record()))
    for one, other in zip(stored["sessions"], found["sessions"], strict=True):
        assert one == other, f"{one['what']}: {HOW}"


def test_answers_end_in_every_way(answers: list[dict[str, Any]]) -> None:
    assert len(FILE.read_bytes()) < 300_000
    assert {answer["reason"] for answer in answers} == {"stop", "max_tokens", "context"}
    assert {answer["mode"] for answer in answers} == {
        "plain",
        "plain_step",
        "speculative",
        "adaptive",
    }
    calls = [call for answer in answers for call in answer["calls"]]
    assert {call["outputs"]["count"][0] for call in calls if call["function"] == STEP} == {
        1,
        2,
        3,
        4,
    }
    assert {len(call["inputs"]["path"]) for call in calls if call["function"] == DRAFT} == {
        1,
        2,
        3,
        4,
    }


def test_a_stop_within_accepted_drafts_leaves_some_behind(answers: list[dict[str, Any]]) -> None:
    ends = [
        answer
        for answer in answers
        if answer["reason"] == "stop" and answer["calls"][-1]["function"] == STEP
    ]
    left = [answer["calls"][-1]["outputs"]["count"][0] - len(answer["runs"][-1]) for answer in ends]
    assert len(left) > 10 and max(left) > 1


def test_prompts_are_prefilled_in_chunks_and_what_they_share_is_not(
    answers: list[dict[str, Any]],
) -> None:
    first = []
    for answer in answers:
        first.append([call["function"] for call in answer["calls"][:3]])
    assert [PREFILL] * 3 in first
    assert sum(answer["calls"][0]["inputs"]["length"] > [0] for answer in answers) > 10


def test_adaptive_mode_pauses_and_comes_back(answers: list[dict[str, Any]]) -> None:
    kinds = []
    for answer in answers:
        kinds.append("".join(call["function"] for call in answer["calls"]))
    assert any(f"{STEP}{PLAIN * SHORT}{STEP}" in kind for kind in kinds)
    assert any(f"{STEP}{PLAIN * (5 * SHORT)}" in kind for kind in kinds)
    assert any(f"{PLAIN * (5 * SHORT)}{STEP}" in kind for kind in kinds)


def test_drafts_are_looked_up_and_chosen_by_the_host(answers: list[dict[str, Any]]) -> None:
    steps = [
        before["outputs"]["next_drafts"] != call["inputs"]["drafts"]
        for answer in answers
        for before, call in pairwise(answer["calls"])
        if before["function"] in (STEP, DRAFT, PREFILL) and call["function"] in (STEP, VERIFY)
    ]
    assert sum(steps) > 30


def test_a_seed_gives_one_answer(answers: list[dict[str, Any]]) -> None:
    pairs = [
        (one, two)
        for one, two in pairwise(answers)
        if "sampling" in one and one["prompt"] == two["prompt"]
    ]
    assert len(pairs) >= 8
    for one, two in pairs:
        assert list(chain.from_iterable(one["runs"])) == list(chain.from_iterable(two["runs"]))
        assert (one["mode"], two["mode"]) == ("plain", "speculative")
