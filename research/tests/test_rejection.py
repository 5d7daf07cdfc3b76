"""``research/rejection.py``: its exact computations against drawing, and which rules are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from research import rejection as rules
from ssdevice.tree import Tree

DRAWS = 4_000
DRAWN = 400
"""By the product's code, which takes longer."""


def drawn(p: list[Any], q: list[Any], k: int, corrected: bool) -> tuple[Any, int]:
    """Frequencies of texts, and all tokens of steps, under rejection along each path, by drawing."""
    rng = np.random.default_rng(0)
    tree = Tree.full(k, len(q))
    depth = len(q)
    counts = np.zeros([rules.V] * (depth + 1))
    emitted = 0
    for _ in range(DRAWS):
        drafts = [rng.choice(rules.V, k, p=each) for each in q]
        best: list[int] = []
        accepted = {(): True}
        for ranks in tree.paths[1:]:
            path = [drafts[d][rank] for d, rank in enumerate(ranks)]
            likely = p[len(path) - 1][tuple(path)] / q[len(path) - 1][path[-1]]
            accepted[ranks] = accepted[ranks[:-1]] and rng.random() < likely
            if accepted[ranks] and len(path) > len(best):
                best = path
        d = len(best)
        emitted += d + 1
        left = (
            np.maximum(p[d][tuple(best)] - q[d], 0)
            if corrected and d < depth
            else p[d][tuple(best)]
        )
        text = [*best, rng.choice(rules.V, p=left / left.sum())]
        while len(text) <= depth:
            text.append(rng.choice(rules.V, p=p[len(text)][tuple(text)]))
        counts[tuple(text)] += 1
    return counts, emitted


@pytest.mark.parametrize("corrected", [True, False], ids=["residual", "literally"])
@pytest.mark.parametrize("k", [1, 2])
def test_rejection_along_each_path_has_the_computed_distribution(k: int, corrected: bool) -> None:
    p, q = rules.random_model(3, 2)
    joint, emitted = rules.per_path(p, q, k, corrected)
    counts, tokens = drawn(p, q, k, corrected)
    assert joint.sum() == pytest.approx(1)
    assert chisquare(counts.ravel(), joint.ravel() * DRAWS).pvalue > 1e-4
    assert tokens / DRAWS == pytest.approx(emitted, abs=0.06)


def test_it_is_exact_for_chains_only() -> None:
    for seed, depth in ((0, 1), (1, 2), (2, 3)):
        p, q = rules.random_model(seed, depth)
        found = [rules.distance(rules.per_path(p, q, k)[0], rules.joint(p)) for k in (1, 2)]
        assert found[0] < 1e-12 and found[1] > 0.02
        assert rules.distance(rules.per_path(p, q, 1, corrected=False)[0], rules.joint(p)) > 0.02


@pytest.mark.parametrize("k", [1, 2, 3])
def test_multi_round_rejection_is_exact(k: int) -> None:
    p, q = rules.random_model(4, 2)
    joint, emitted = rules.multi_round(p, q, k)
    assert rules.distance(joint, rules.joint(p)) < 1e-12
    assert 1 < emitted <= rules.per_path(p, q, k)[1] + 1e-12


def test_the_products_rule_gives_the_same_texts_with_any_drafts() -> None:
    p, q = rules.random_model(5, 2)
    plain, _ = rules.product(p, q, 1, DRAWN, drafts="none")
    for k, drafts in ((1, "drawn"), (2, "likeliest"), (3, "drawn")):
        found, emitted = rules.product(p, q, k, DRAWN, drafts=drafts)
        assert np.array_equal(found, plain) and emitted > 1
    assert chisquare(plain.ravel() * DRAWN, rules.joint(p).ravel() * DRAWN).pvalue > 1e-4
    typical, more = rules.product(p, q, 3, DRAWN, epsilon=0.09)
    assert more > emitted and rules.distance(typical, rules.joint(p)) > 0.2
