"""The spread of two right results, within which an export must stay."""

from __future__ import annotations

import numpy as np
import pytest

from ssdevice.errors import ParityError
from ssdevice.export.parity.gate import FLOAT_JITTER
from ssdevice.export.parity.spread import Spread


def test_ids_outside_a_draft_vocabulary_excuse_no_wrong_draft() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    logits[:, 10:] = -np.inf
    spread = Spread()
    spread.logits(logits + np.float32(1e-5), logits)
    assert 0 < spread.facts()["logits_spread"] < 1e-4
    spread.tie("step at 5", "draft 0 of stream 1", 3, 7, margin=0.5)
    with pytest.raises(ParityError, match="draft 0 of stream 1 is 3"):
        spread.judge(FLOAT_JITTER)
