"""Ids that an artifact and the reference chose from the same logits."""

from __future__ import annotations

import numpy as np
import pytest

from ssdevice.errors import ParityError
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
