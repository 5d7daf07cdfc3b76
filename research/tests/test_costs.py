"""``research/costs.py`` and ``two_models.py``: what they count and compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from research import costs, rivals, two_models
from research.costs import METHODS, Shape
from research.trained import Base
from ssdevice.config import Mode, StreamConfig, StreamMLP
from ssdevice.model import loading
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import collate
from ssdevice.train.loss import LossWeights, StreamingLoss
from tests.runtime import tiny_bundle as tiny

TOKENS = 16
GAMMA = 3


@pytest.fixture
def shape() -> Shape:
    return Shape(json.loads((tiny.base_folder() / "config.json").read_text()), TOKENS, GAMMA)


@torch.no_grad()
@pytest.mark.parametrize("name", rivals.RIVALS)
def test_rivals_cost_what_a_counter_of_operations_sees(name: str, shape: Shape) -> None:
    """All rows are new, so each costs a row's part; Mixture of Attentions makes a query of each,
    not of each draft.
    """
    base = Base(loading.build(loading.load_hf(tiny.base_folder()), None, 96).backbone, GAMMA)
    drafter = rivals.new(name, base, 0)
    tokens = torch.arange(TOKENS)[None]
    last = torch.tensor([[TOKENS - 1]])
    with FlopCounterMode(display=False) as counter:
        main = base.main(tokens)
    assert counter.get_total_flops() == TOKENS * (shape.plain() - shape.head)
    with FlopCounterMode(display=False) as counter:
        drafter.guesses(tokens, main, last)
    cost = METHODS[name](shape)
    queries = 0
    if name in rivals.MIXTURES:
        layers = min(int(name[-1]), shape.layers)
        cost = costs.mixture(shape, layers)
        with FlopCounterMode(display=False) as counted:
            drafter.queries(tokens)
        queries = counted.get_total_flops() * (TOKENS - GAMMA) // TOKENS
    assert counter.get_total_flops() == cost.draft + TOKENS * cost.row + queries
    assert sum(p.numel() for p in drafter.parameters()) == cost.parameters


@torch.no_grad()
@pytest.mark.parametrize("name", ["our streams", "the paper's streams", "our draft layers"])
def test_ours_cost_what_a_counter_of_operations_sees(name: str, shape: Shape) -> None:
    config, cost = {
        "our streams": (
            StreamConfig(Mode.LOSSLESS, GAMMA, 1, token_rank=6),
            costs.streams(shape, 1, 8, 6),
        ),
        "the paper's streams": (
            StreamConfig(Mode.LOSSLESS, GAMMA, 1, stream_mlp=StreamMLP.ADAPTER_ONLY),
            costs.streams_of_the_paper(shape, 1),
        ),
        "our draft layers": (
            StreamConfig(Mode.LOSSLESS, GAMMA, 0, adapter_rank=0, draft_layers=1),
            costs.draft_layers(shape),
        ),
    }[name]
    model = loading.build(loading.load_hf(tiny.base_folder()), config, 96)
    probe = StreamingLoss(model, LossWeights(0.0, 1.0))
    tokens = collate([Sample(tuple(range(TOKENS)), 8)], 0).tokens
    read, _, rows = probe.run_main(tokens)
    with FlopCounterMode(display=False) as counter:
        states, rows = probe.run_own(read, rows)
    assert counter.get_total_flops() == TOKENS * cost.row
    with FlopCounterMode(display=False) as counter:
        model.draft_logits(
            model.finish(probe.run_streams(states, torch.tensor([[TOKENS - 2]]), tokens, rows))
        )
    assert counter.get_total_flops() == cost.draft
    assert (
        model.streams is not None
        and sum(p.numel() for p in model.streams.parameters()) == cost.parameters
    )


def test_a_folder_has_a_table_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    costs.main([str(tiny.base_folder()), "--context", "100"])
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in METHODS)


def test_streams_beside_a_draft_model_are_equation_6(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The papers' own example: γ = 4 and a draft model ten times as quick must emit 1.4 times as
    many tokens.
    """
    assert two_models.even(10, 4) == pytest.approx(1.4)
    gamma = 3
    draft = 0.6
    target = 4.0
    streams = 5.0
    zeta = 2.0
    beta = 3.1
    mine = two_models.faster(zeta / beta, 3.0 / draft, gamma, target / 3.0, streams / 3.0)
    assert mine == pytest.approx(((gamma * draft + target) / zeta) / (streams / beta))
    two_models.main(["--plain", "3", "--verify", "4", "--streams", "5", "--out", str(tmp_path)])
    assert "| as the papers | even at |" in capsys.readouterr().out
    assert (tmp_path / "two-models.svg").read_text().count("<line") > 20
