"""The comparison of sampled answers finds what breaks the promise, and excuses only rows that
differ a little.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ssdevice.bench.equality import Asked
from ssdevice.bench.modes import FORCED
from ssdevice.bench.sampled import SAMPLERS, Sampled, compare_sampled
from ssdevice.bundle.manifest import Precision
from ssdevice.cli import main
from ssdevice.contract import VERIFY, VERIFY_PLAIN
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.session import Session
from tests.runtime.tiny_bundle import tiny_bundle


def compare(session: Session, seeds: int = 0) -> Sampled:
    prompts = [[3, 4, 5], [6], [7, 8, 9, 3, 4, 5, 6, 7, 8, 9]]
    return compare_sampled(
        session.engine,
        session.tokenizer,
        Asked(prompts, (), 30, Precision.FP32, lambda *_: None),
        seeds,
    )


def changed(monkeypatch: pytest.MonkeyPatch, function: str, by: Any) -> None:
    """Change the logits of a function."""
    logits = Conversation._logits

    def change(self: Conversation, name: str, last: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        found = logits(self, name, last)
        return (found + by(found) if name == function else found).astype(np.float32)

    monkeypatch.setattr(Conversation, "_logits", change)


@pytest.mark.wide
def test_right_answers_have_no_faults_and_end_at_every_node() -> None:
    with Session.open(tiny_bundle("fp32", choose=True), threads=1) as session:
        result = compare(session, seeds=1)
        assert result.faults() == [] and result.nodes_ended == set(range(result.nodes))
        assert result.prompts >= 3 * len(SAMPLERS) and result.modes == [
            "speculative",
            FORCED,
            "adaptive",
        ]
        assert compare(session).prompts == 3


@pytest.mark.wide
def test_a_path_of_other_logits_is_a_fault_and_a_rounded_one_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Session.open(tiny_bundle("fp32", choose=True), threads=1) as session:
        with monkeypatch.context() as patch:
            changed(
                patch, VERIFY, lambda logits: 9 * np.sin(np.indices(logits.shape).prod(axis=0))
            )  # but at the root
            faults = compare(session).faults()
            assert any(fault.startswith(f"sampled, {FORCED}: prompt") for fault in faults)
        changed(monkeypatch, VERIFY_PLAIN, lambda logits: 1e-5)
        result = compare(session)
        assert max(result.as_json()["other_bits"].values()) > 0
        assert result.faults() == []
        result.exact = True
        assert any("with other bits" in fault for fault in result.faults())


def test_verify_compares_sampled_answers(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny_bundle("fp32", choose=True).folder)
    call = ["verify", folder, "--limit", "2", "--max-tokens", "20", "--threads", "1"]
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampled"]["equal"][FORCED] == 2
    assert main([*call, "--json", "--seeds", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["sampled"]
    assert found["prompts"] >= 14 and found["differences"] == []
    assert main(["verify", str(tiny_bundle().folder), "--seeds", "1"]) == 2
    assert "--seeds has no effect" in capsys.readouterr().err
