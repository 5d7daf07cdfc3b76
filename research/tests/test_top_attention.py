"""``research/top_attention.py``: streams see the positions that their main row weighs most, and
no others.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from research import rivals, top_attention, top_trained
from ssdevice.model import loading
from ssdevice.text.tokenizer import Sample
from ssdevice.train import evaluation, loss, trainer
from ssdevice.train.batches import collate
from ssdevice.train.options import LossWeights
from tests.runtime import tiny_bundle as tiny

IDS = (1, 5, 9, 3, 7, 7, 2, 11, 4, 6, 8, 1, 3, 5)
SAMPLES = [Sample(IDS, 8), Sample(IDS[2:12], 6)]


@pytest.fixture(scope="module")
def model() -> Any:
    return loading.load(tiny.base_folder(), Path(tiny.adapter_folder()), 64).model.eval()


def test_all_positions_are_no_limit(model: Any) -> None:
    everything = evaluation.stream_ranks(model, SAMPLES)
    with top_attention.limited(len(IDS) + 3):
        assert evaluation.stream_ranks(model, SAMPLES) == everything
    with top_attention.limited(1):
        assert evaluation.stream_ranks(model, SAMPLES) != everything
    assert evaluation.stream_ranks(model, SAMPLES) == everything, (
        "the context leaves the model as it was"
    )


@pytest.mark.parametrize("p", [1, 3])
def test_streams_see_what_their_main_row_weighs_most(
    model: Any, p: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of every layer and sample, against weights that are written out row by row and head
    by head.
    """
    asked: list[Any] = []
    given: list[Tensor] = []
    attend = top_attention.attend
    by_node = loss.attend_by_node
    monkeypatch.setattr(top_attention, "attend", lambda each: asked.append(each) or attend(each))
    monkeypatch.setattr(
        loss, "attend_by_node", lambda each, gamma: given.append(each.mask) or by_node(each, gamma)
    )
    with top_attention.limited(p), torch.no_grad():
        evaluation.stream_ranks(model, SAMPLES)
    asked = asked[model.first_msa :]
    assert len(given) == len(asked) == model.backbone.num_layers - model.first_msa
    for main, mask in zip(asked, given, strict=True):
        (keys,) = main.keys
        groups = main.query.shape[1] // main.keys[0].shape[1]
        for b, head in itertools.product(range(len(SAMPLES)), range(keys.shape[1])):
            sample = SAMPLES[b]
            for at, node in enumerate(range(sample.prompt - 1, len(sample.ids) - 1)):
                weight = sum(
                    torch.softmax(
                        keys[b, head, : node + 1] @ main.query[b, h, node] * main.scale, 0
                    )
                    for h in range(head * groups, (head + 1) * groups)
                )
                best = set(weight.topk(p).indices.tolist())  # type: ignore[union-attr]
                for stream in range(model.gamma):
                    row = mask[b, head, at * model.gamma + stream, : len(IDS)]
                    assert set((row > -1e8).nonzero()[:, 0].tolist()) == best


def test_segments_of_a_batch_have_the_loss_and_gradients_of_the_whole(model: Any) -> None:
    batch = collate(SAMPLES, 0)
    learned = [p for name, p in model.streams.named_parameters() if p.requires_grad]
    with top_attention.limited(2):
        whole, parts = (
            trainer.StreamingLoss(model, LossWeights(0.0, 1.0), nodes) for nodes in (2048, 4)
        )
    assert isinstance(whole, top_attention.LimitedLoss)
    found = [
        (each(*batch)[0], torch.autograd.grad(each(*batch)[0], learned)) for each in (whole, parts)
    ]
    free = trainer.StreamingLoss(model, LossWeights(0.0, 1.0))(*batch)[0]
    assert found[0][0].item() == pytest.approx(found[1][0].item()) != free.item()
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_one_command_trains_with_the_mask_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rivals.OURS, "streams", ("--msa-layers", "1", "--token-rank", "4"))
    rows = [
        {"prompt": text * 2, "completion": text * 3}
        for text in ("abc", "bca", "hello", "aab", "cab")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "rows.jsonl")
    numbers = {"steps": 2, "batch-size": 2, "max-length": 64, "gamma": 2, "best": 1}
    words = [
        "--base",
        str(tiny.base_folder()),
        "--data",
        file,
        "--dev",
        file,
        "--out",
        str(tmp_path / "out"),
    ]
    top_trained.main(
        [*words, *(part for name, n in numbers.items() for part in (f"--{name}", str(n)))]
    )
    said = [
        [cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()
    ]
    pairs = [row[1:3] for row in said if len(row) > 3]
    assert pairs[2:] == [["all", "all"], ["all", "p = 1"], ["p = 1", "p = 1"], ["p = 1", "all"]]
