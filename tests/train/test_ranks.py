"""Simulated tokens per step are the ones that decoding gets."""

from __future__ import annotations

import pytest
import torch

from ssdevice.config import Mode, Schedule
from ssdevice.text.tokenizer import Sample
from ssdevice.train.evaluation import stream_ranks
from ssdevice.tree import MISS, Tree, count_paths, tokens_per_step
from tests.model.reference import Reference
from tests.train.test_loss import GAMMA, OWN, tiny_model


def test_a_perfect_chain_emits_depth_plus_one_tokens() -> None:
    ranks = [[[0] * GAMMA for _ in range(9)]]
    assert tokens_per_step(ranks, Tree.chain(GAMMA)) == 4.0
    assert tokens_per_step(ranks, Tree.root_only()) == 1.0


def test_paths_end_before_the_first_miss() -> None:
    assert count_paths([[[0, MISS, 0], [1, 2, MISS]]]) == {(0,): 1, (1, 2): 1}


TREES = Tree.chain(GAMMA), Tree.full(4, 2), Tree.full(6, 1)


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        pytest.param(tree, {"follow_rank": rank}, marks=[] if tree.is_chain else pytest.mark.wide)
        for tree in TREES
        for rank in (0, 5)
    ]
    + [(tree, OWN) for tree in TREES if tree.is_chain],
)
def test_simulation_equals_decoding(tree: Tree, kind: dict[str, int]) -> None:
    model = tiny_model(Mode.LOSSLESS if kind is OWN else Mode.SHARED, **kind).eval()
    reference = Reference(model, tree, tree.width, Schedule.DEFERRED, 96, chunk=16)
    emitted = steps = 0
    samples = []
    with torch.no_grad():
        for seed in range(6):
            prompt = torch.randint(
                0, 61, (5 + seed,), generator=torch.Generator().manual_seed(seed)
            ).tolist()
            result = reference.speculative(prompt, 40)
            assert result.tokens == reference.plain(prompt, 40).tokens
            emitted += sum(result.steps)
            steps += len(result.steps)
            samples.append(Sample((*prompt, *result.tokens), len(prompt)))
    ranks = stream_ranks(model, samples)
    assert tokens_per_step(ranks, tree) == pytest.approx(emitted / steps)
