"""What the Swift tests are given is worth testing with; Python checks this everywhere, Swift runs where it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.swift import broken, conversations


def test_the_swift_package_has_the_schema_of_manifests(repository: Path) -> None:
    name = "manifest.schema.json"
    copy = repository / "apps" / "ios_demo" / "Sources" / "SpeculativeDecoding" / name
    assert copy.read_bytes() == (repository / "ssdevice" / "bundle" / name).read_bytes(), f"copy {name} there"


def test_recorded_conversations_end_in_every_way() -> None:
    answers = [answer for found in conversations.record()["conversations"] for answer in found["answers"]]
    ends = Counter(answer["runs"][-1]["reason"] for answer in answers if answer["runs"])
    assert min(ends[reason] for reason in ("stop", "max_tokens", "context", None)) > 5
    assert sum(answer["refused"] for answer in answers) > 5
    assert any(
        call["outputs"]["count"][0] > 2 for answer in answers for call in answer["calls"] if "count" in call["outputs"]
    )


def test_broken_bundles_are_refused_but_for_some(tmp_path: Path) -> None:
    broken.write(tmp_path / "broken")
    verdicts = json.loads((tmp_path / "broken" / "verdicts.json").read_text("utf-8"))["verdicts"]
    assert verdicts[0]["accepted"]
    counts = Counter(verdict["accepted"] for verdict in verdicts)
    assert counts[False] > 150 and counts[True] > 20
