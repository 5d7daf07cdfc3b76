"""What the Swift tests are given is worth testing with; Python checks this everywhere, Swift runs
where it is.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ssdevice.runtime.adaptive import SHORT
from tests.swift import broken, conversations, frames


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """Those of all recorded conversations."""
    return [
        answer for found in conversations.record()["conversations"] for answer in found["answers"]
    ]


def test_the_swift_package_has_the_schema_of_manifests(repository: Path) -> None:
    name = "manifest.schema.json"
    copy = repository / "apps" / "ios_demo" / "Sources" / "SpeculativeDecoding" / name
    assert copy.read_bytes() == (repository / "ssdevice" / "bundle" / name).read_bytes(), (
        f"copy {name} there"
    )


@pytest.mark.wide
def test_recorded_conversations_end_in_every_way(answers: list[dict[str, Any]]) -> None:
    ends = Counter(answer["runs"][-1]["reason"] for answer in answers if answer["runs"])
    assert min(ends[reason] for reason in ("stop", "max_tokens", "context", None)) > 5
    assert sum(answer["refused"] for answer in answers) > 5
    assert any(
        call["outputs"]["count"][0] > 2
        for answer in answers
        for call in answer["calls"]
        if "count" in call["outputs"]
    )


@pytest.mark.wide
def test_recorded_adaptive_answers_pause_and_come_back(answers: list[dict[str, Any]]) -> None:
    kinds = []
    for answer in answers:
        if answer["mode"] == "adaptive":
            kinds.append("".join(call["function"] for call in answer["calls"]))
    long = "step_plain" * (SHORT - 1)
    assert sum(f"stepstep{long}" in kind for kind in kinds) > 5
    assert sum(f"{long}stepstep" in kind for kind in kinds) > 5
    assert any("step_plain" * (5 * SHORT) in kind for kind in kinds)


@pytest.mark.wide
def test_recorded_adaptive_answers_look_drafts_up(answers: list[dict[str, Any]]) -> None:
    steps = [
        (before["outputs"]["next_drafts"], call["inputs"]["drafts"])
        for answer in answers
        for before, call in pairwise(answer["calls"])
        if answer["mode"] == "adaptive" and before["function"] == call["function"] == "step"
    ]
    assert sum(drafted != verified for drafted, verified in steps) > 20


@pytest.mark.wide
def test_recorded_chats_find_what_they_share_in_the_cache(answers: list[dict[str, Any]]) -> None:
    lengths = [
        answer["calls"][0]["inputs"]["length"][0]
        for answer in answers
        if "chat" in answer and answer["calls"]
    ]
    assert sum(length > 20 for length in lengths) > 20


@pytest.mark.wide
def test_prompts_are_written_and_refused() -> None:
    cases = frames.record()["cases"]
    assert sum(case["text"] is None for case in cases) > 50
    assert sum(case["text"] is not None for case in cases) > 400
    assert {
        frame["trim"]
        for case in cases
        for frame in case["frames"].values()
        if isinstance(frame, dict)
    } > {"both"}


@pytest.mark.wide
def test_broken_bundles_are_refused_but_for_some(tmp_path: Path) -> None:
    broken.write(tmp_path / "broken")
    verdicts = json.loads((tmp_path / "broken" / "verdicts.json").read_text("utf-8"))["verdicts"]
    assert verdicts[0]["accepted"]
    counts = Counter(verdict["accepted"] for verdict in verdicts)
    assert counts[False] > 150 and counts[True] > 20
