"""Core AI's argmax gives the lowest of equal ids, on which the step's choices and drafts rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.coreai.bundles import ABSENT

pytest.importorskip("coreai_torch", reason=ABSENT)

import torch
from torch import Tensor, nn

from ssdevice.model.operators import top_k
from tests.export.coreai.computed import computed

ROWS = 4
VOCAB = 5000
K = 3


class Choice(nn.Module):
    """The ids that a step takes from logits."""

    def forward(self, logits: Tensor) -> Tensor:
        return top_k(logits, K)


def test_ties_go_to_the_lowest_id(tmp_path: Path) -> None:
    scores = torch.randint(0, 40, (ROWS, VOCAB), generator=torch.Generator().manual_seed(0)).float()
    scores[0] = -1.0
    expected = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :K]
    assert computed(Choice(), scores, tmp_path).tolist() == expected.tolist()
