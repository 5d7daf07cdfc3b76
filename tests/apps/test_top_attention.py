"""``apps/paper/top_attention.py``: streams see the positions that their main row weighs most, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apps.paper import top_attention
from ssdevice.model import loading
from ssdevice.text.tokenizer import Sample
from ssdevice.train import loss
from ssdevice.train.evaluation import stream_ranks
from tests.runtime import tiny_bundle as tiny

IDS = (1, 5, 9, 3, 7, 7, 2, 11, 4, 6, 8, 1, 3, 5)
SAMPLE = Sample(IDS, 8)
NODES = range(SAMPLE.prompt - 1, len(IDS) - 1)


@pytest.fixture(scope="module")
def model() -> Any:
    return loading.load(tiny.base_folder(), Path(tiny.adapter_folder()), 64).model.eval()


def test_all_positions_are_no_limit(model: Any) -> None:
    everything = stream_ranks(model, [SAMPLE])
    with top_attention.limited(model, NODES, len(IDS)):
        assert stream_ranks(model, [SAMPLE]) == everything
    assert stream_ranks(model, [SAMPLE]) == everything, "the context leaves the model as it was"


@pytest.mark.parametrize("p", [1, 3])
def test_streams_see_what_their_main_row_weighs_most(model: Any, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of every layer, against weights that are written out row by row and head by head."""
    asked: list[Any] = []
    given: list[Tensor] = []
    attend, by_node = top_attention.attend, loss.attend_by_node
    monkeypatch.setattr(top_attention, "attend", lambda each: asked.append(each) or attend(each))
    monkeypatch.setattr(loss, "attend_by_node", lambda each, gamma: given.append(each.mask) or by_node(each, gamma))
    with top_attention.limited(model, NODES, p), torch.no_grad():
        stream_ranks(model, [SAMPLE])
    asked = asked[model.first_msa :]
    assert len(given) == len(asked) == model.backbone.num_layers - model.first_msa
    for main, mask in zip(asked, given, strict=True):
        (keys,), groups = main.keys, main.query.shape[1] // main.keys[0].shape[1]
        for head in range(keys.shape[1]):
            for at, node in enumerate(NODES):
                weight = sum(
                    torch.softmax(keys[0, head, : node + 1] @ main.query[0, h, node] * main.scale, 0)
                    for h in range(head * groups, (head + 1) * groups)
                )
                best = set(weight.topk(p).indices.tolist())  # type: ignore[union-attr]
                for stream in range(model.gamma):
                    row = mask[0, head, at * model.gamma + stream, : len(IDS)]
                    assert set((row > -1e8).nonzero()[:, 0].tolist()) == best
