"""The spread of two right results, within which an export must stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ssdevice.errors import ParityError
from ssdevice.export.exporter import ExportJob
from ssdevice.export.parity import gate
from ssdevice.export.parity.gate import FLOAT_JITTER
from ssdevice.export.parity.spread import Spread


def test_ids_outside_a_draft_vocabulary_excuse_no_wrong_draft() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    logits[:, 10:] = -np.inf
    spread = Spread()
    spread.logits(logits + np.float32(1e-5), logits)
    assert 0 < spread.facts()["logits_spread"] < 1e-4
    spread.tie("step at 5", "draft 0 of stream 1", 3, 7, margin=0.5)
    assert "draft 0 of stream 1 is 3" in str(spread.fault(FLOAT_JITTER))


def drawn(seed: int, by: float) -> Spread:
    """Rows that differ by 1e-3 in the artifact and by ``by`` in the twin."""
    rows = np.random.default_rng(seed).standard_normal((4, 6, 8))
    spread = Spread()
    spread.rows(rows + 1e-3, rows + by, rows)
    return spread


def test_the_largest_of_several_draws_is_what_right_results_may_differ_by() -> None:
    spread = drawn(0, by=1e-4)
    first = spread.fault(FLOAT_JITTER)
    assert first is not None and "keys of layer 0" in first
    spread.widen(drawn(0, by=1e-5))
    assert spread.fault(FLOAT_JITTER) == first
    spread.widen(drawn(1, by=6e-4))
    assert spread.fault(FLOAT_JITTER) is None


@pytest.mark.parametrize(
    ("sizes", "draws"), [([6e-4], 1), ([1e-4, 1e-4, 6e-4], 3), ([1e-4] * 5, 5)]
)
def test_more_draws_are_made_only_while_an_artifact_looks_wrong(
    monkeypatch: pytest.MonkeyPatch, sizes: list[float], draws: int
) -> None:
    seeds: list[int] = []

    def run(job: Any, artifact: Any, jitter: float, steps: int, seed: int) -> Any:
        seeds.append(seed)
        return SimpleNamespace(spread=drawn(0, by=sizes[seed - 1]), facts=dict)

    monkeypatch.setattr(gate, "_run", run)
    monkeypatch.setattr(gate, "TorchDriver", lambda job: None)
    if max(sizes) > 5e-4:
        gate.compare(cast(ExportJob, None), cast(Any, None), FLOAT_JITTER)
    else:
        with pytest.raises(ParityError, match="committed rows, keys of layer 0"):
            gate.compare(cast(ExportJob, None), cast(Any, None), FLOAT_JITTER)
    assert seeds == list(range(1, draws + 1))
