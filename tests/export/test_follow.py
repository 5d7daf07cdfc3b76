"""Ids that an artifact and the reference chose from the same logits."""

from __future__ import annotations

import numpy as np
import pytest

from ssdevice.errors import ParityError
from ssdevice.export.parity.difference import difference, stored_difference
from ssdevice.export.parity.follow import same_ids

LOGITS = np.array([1.0, -np.inf, 3.0, 3.0 - 1e-6, -5.0], np.float32)
"""Token 1 is outside the draft vocabulary."""


@pytest.mark.parametrize("mine", [2, 3])
def test_the_best_and_a_near_tie_are_right(mine: int) -> None:
    same_ids("next_drafts[0,0]", mine, 2, LOGITS, bound=1e-5)


@pytest.mark.parametrize("mine", [0, 1, 4, 5, -1])
def test_other_ids_are_refused_with_a_draft_vocabulary_too(mine: int) -> None:
    with pytest.raises(ParityError, match=rf"next_drafts.0,0. is {mine}, .* say 2"):
        same_ids("next_drafts[0,0]", mine, 2, LOGITS, bound=1e-5)


def test_an_outlier_at_a_rounding_edge_is_no_difference() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    rows[1, 5] = -1329.5  # between two float16
    right = rows.astype(np.float16)
    other = rows.astype(np.float16)
    other[1, 5] = np.nextafter(
        right[1, 5], np.float16(-np.inf) if right[1, 5] > rows[1, 5] else np.float16(np.inf)
    )
    assert stored_difference(right, rows) == 0
    assert (
        difference(other.astype(np.float32), right.astype(np.float32))
        > 2e-4
        > stored_difference(other, rows)
    )
    other[0, 3] += np.float16(0.01)
    assert stored_difference(other, rows) > 2e-4
    assert stored_difference(rows * np.float32(1.001), rows) > 2e-4
