"""Core AI's argmax gives the lowest of equal ids, on which the step's choices and drafts rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.export.coreai.bundles import ABSENT

pytest.importorskip("coreai_torch", reason=ABSENT)

import torch
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray
from torch import Tensor, nn

from ssdevice.export.coreai.conversion import TorchConverter, get_decomp_table
from ssdevice.model.step import top_k

ROWS, VOCAB, K = 4, 5000, 3


class Choice(nn.Module):
    """The ids that a step takes from logits."""

    def forward(self, logits: Tensor) -> Tensor:
        return top_k(logits, K)


def test_ties_go_to_the_lowest_id(tmp_path: Path) -> None:
    scores = torch.randint(0, 40, (ROWS, VOCAB), generator=torch.Generator().manual_seed(0)).float()
    scores[0] = -1.0
    program = torch.export.export(Choice(), (scores,)).run_decompositions(get_decomp_table())
    TorchConverter().add_exported_program(program).to_coreai().save_asset(tmp_path / "choice.aimodel")

    async def run() -> list[list[int]]:
        async with AIModelAsset.load(tmp_path / "choice.aimodel").executable() as model:
            function = model.load_function("main")
            (ids,) = (await function({function.desc.input_names[0]: NDArray(scores.numpy())})).values()
            found: list[list[int]] = ids.numpy().tolist()
            return found

    expected = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :K]
    assert asyncio.run(run()) == expected.tolist()
