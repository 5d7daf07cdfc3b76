"""Answers against the torch reference: a near-tie that is shown is no failure, however short the
run.
"""

from __future__ import annotations

import pytest
import torch

from ssdevice.bench.against_torch import LEAST_AGREEMENT, TIES, Agreement, judge
from ssdevice.bundle.manifest import Precision


def agreement(
    tokens: int, agreeing: int, near_ties: int, worst: float, simulated: bool = True
) -> list[str]:
    return Agreement(tokens, agreeing, near_ties, worst, simulated, Precision.INT8).faults()


@pytest.mark.parametrize("simulated", [True, False])
def test_near_ties_fail_no_run(simulated: bool) -> None:
    for tokens in (1, 32, 640):
        for ties in (1, tokens // 20):
            assert agreement(tokens, tokens - ties, ties, 0.49, simulated) == []


def test_other_choices_count_against_the_share_and_alone_by_their_margin() -> None:
    (share,) = agreement(32, 30, 0, 0.2)
    assert "93.8% of tokens agree or are near-ties, at least 97% must" in share
    assert agreement(320, 311, 0, 0.2) == [], "97 % of them"
    assert len(agreement(320, 310, 0, 0.2)) == 1
    (margin,) = agreement(320, 319, 0, 0.51)
    assert "prefers another token by 0.51, at most 0.5 is a near-tie" in margin


def test_a_near_tie_is_the_second_choice_at_a_small_distance() -> None:
    logits = torch.tensor([[3.0, 2.9, 2.8, 0.0]]).repeat(4, 1)
    assert judge(logits, torch.tensor([0, 1, 2, 3]), 0.5) == (1, 1, 3.0)
    assert judge(logits, torch.tensor([0, 1, 1, 1]), 0.05) == (1, 0, pytest.approx(0.1))
    assert judge(torch.tensor([[1.0, 1.0]]), torch.tensor([1]), 0.5) == (0, 1, 0.0), (
        "the lower id is the first choice"
    )


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_a_bundle_that_answers_anything_is_not_excused_where_all_logits_are_close(
    precision: Precision,
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 50) * 0.01
    chosen = torch.randint(50, (200,))
    agree, near, worst = judge(logits, chosen, TIES[precision])
    assert worst < TIES[precision] and (agree + near) / 200 < LEAST_AGREEMENT[precision]
    assert Agreement(200, agree, near, worst, True, precision).faults()
