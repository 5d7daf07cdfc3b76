"""Pairs of sampled tokens have their exact probabilities, with and without drafts that are right half of the time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from ssdevice.runtime.sampling.choice import Chooser, truncated, walk
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.tree import Tree

SIZE, PROMPT = 5, [1, 2, 2]
TREE = Tree.of([[0], [1], [0, 0]])
MODEL = (np.random.default_rng(3).normal(size=(SIZE, SIZE)) * 1.2).astype(np.float32)
"""The logits after each token."""
CASES = [
    Sampling(temperature=0.8),
    Sampling(temperature=1.1, top_p=0.8),
    Sampling(temperature=0.9, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=1.0, min_p=0.1, no_repeat_ngram_size=2),
]


def processed(sampling: Sampling, answer: list[int]) -> Any:
    """The scores of the next token by the formulas of the field."""
    text = [*PROMPT, *answer]
    scores = MODEL[text[-1]].astype(np.float64)
    for token in set(text):
        scores[token] *= sampling.repetition_penalty ** (1 if scores[token] < 0 else -1)
    for token, times in Counter(answer).items():
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.no_repeat_ngram_size:
        scores[[after for before, after in pairwise(text) if before == text[-1]]] = -np.inf
    return scores / sampling.temperature


def exact(sampling: Sampling, answer: list[int]) -> Any:
    """The probabilities of the next token; truncation is tested elsewhere."""
    kept, ids = truncated(processed(sampling, answer).astype(np.float32), sampling)
    p = np.zeros(SIZE)
    p[np.arange(SIZE) if ids is None else ids] = np.exp(kept.astype(np.float64))
    return p / p.sum()


def draw(sampling: Sampling, truth: list[int] | None, rng: np.random.Generator) -> list[int]:
    """The first two tokens of an answer. ``truth``: what half of the drafts are; None: there are no drafts."""
    chooser = Chooser(sampling, PROMPT, [0], SIZE)
    answer: list[int] = []
    while len(answer) < 2:
        if truth is None:
            answer.append(chooser(MODEL[(PROMPT + answer)[-1]]))
            continue
        drafts = rng.integers(0, SIZE, (2, 2)).astype(np.int32)
        for depth, token in enumerate(truth[len(answer) :]):
            if rng.random() < 0.5:
                drafts[depth, rng.integers(0, 2)] = token
        held = [(PROMPT + answer)[-1], *(drafts[len(path) - 1, path[-1]] for path in TREE.paths[1:])]
        answer += walk(TREE, drafts, lambda node: chooser(MODEL[held[node]]))[1]  # noqa: B023  called in this turn
    return answer[:2]


def check(sampling: Sampling, draws: int) -> None:
    rng = np.random.default_rng(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        asked = replace(sampling, seed=seed)
        plain = draw(asked, None, rng)
        assert draw(asked, plain, rng) == plain
        counts[tuple(plain)] += 1
    pairs = list(product(range(SIZE), repeat=2))
    first = exact(sampling, [])
    expected = np.array([first[a] * exact(sampling, [a])[b] if first[a] else 0.0 for a, b in pairs])
    observed = np.array([counts[pair] for pair in pairs])
    assert not observed[expected == 0].any()
    assert chisquare(observed[expected > 0], expected[expected > 0] * draws).pvalue > 1e-4


@pytest.mark.parametrize("sampling", CASES, ids=lambda s: f"T={s.temperature}")
def test_pairs_have_their_exact_probabilities(sampling: Sampling) -> None:
    check(sampling, 800)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", CASES, ids=lambda s: f"T={s.temperature}")
def test_pairs_have_their_exact_probabilities_in_the_long_run(sampling: Sampling) -> None:
    check(sampling, 100_000)
