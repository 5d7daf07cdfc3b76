"""Pairs of sampled tokens have their exact probabilities, with and without drafts that are right
half of the time.

The answers come from the decoding loop; the probabilities from ``transformers``' processors in
float64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from ssdevice.contract import (
    DRAFT,
    DRAFTS,
    LOGITS,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PREFILL,
    ROOT,
    STATES,
    VERIFY,
    VERIFY_PLAIN,
    Geometry,
)
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Cache, Engine, Inputs, Outputs
from ssdevice.runtime.loop import Advance, decode, plain, speculative
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.text.stream import Emission
from ssdevice.tree import Tree

torch = pytest.importorskip("torch")
from transformers.generation import logits_process as hf  # noqa: E402

SIZE = 5
PROMPT = [1, 2, 2]
TREE = Tree.of([[0], [1], [0, 0]])
MODEL = (np.random.default_rng(3).normal(size=(SIZE, SIZE)) * 1.2).astype(np.float32)
"""The logits after each token."""
CASES = [
    Sampling(temperature=0.8),
    Sampling(temperature=1.1, top_p=0.8),
    Sampling(temperature=0.9, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=1.0, min_p=0.1, no_repeat_ngram_size=2),
]


class TableCache(Cache):
    """A model that knows the last token only.

    ``truth``: the answer that half of its drafts are taken from.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.random = np.random.default_rng(0)
        self.truth: list[int] = []

    def call(self, function: str, length: int) -> Outputs:
        if function in (PREFILL, DRAFT):
            answered = max(
                0, length - len(PROMPT) + 1
            )  # the prompt's last token goes with the first step
            return {
                NEXT_ROOT: np.zeros(1, np.int32),
                NEXT_DRAFTS: self.draft(self.truth[answered:]),
            }
        nodes = TREE.draft_indices(2) if function == VERIFY else [0]
        held = [self.inputs[ROOT][0], *self.inputs[DRAFTS].ravel()]
        return {
            LOGITS: MODEL[[held[node] for node in nodes]],
            STATES: np.zeros((len(nodes), 1), np.float32),
        }

    def draft(self, truth: list[int]) -> Any:
        drafts = self.random.integers(0, SIZE, (2, 2)).astype(np.int32)
        for depth, token in enumerate(truth[:2]):
            if self.random.random() < 0.5:
                drafts[depth, self.random.integers(0, 2)] = token
        return drafts


class TableEngine(Engine):
    """Gives table caches."""

    def __init__(self) -> None:
        geometry = Geometry(1, 1, 1, SIZE, TREE.depth, 2, TREE, context=40, chunk=4, hidden=1)
        super().__init__(geometry, frozenset((PREFILL, VERIFY, VERIFY_PLAIN, DRAFT)), Path("table"))

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> Cache:
        return TableCache(inputs)

    def release(self) -> None:
        pass


def answer(conversation: Conversation, sampling: Sampling, advance: Advance) -> list[int]:
    """The first two tokens."""
    conversation.length = 0
    conversation.chosen_by(Chooser(sampling, PROMPT, [0], SIZE))
    runs = decode(
        conversation, PROMPT, advance, lambda run: Emission("", len(run), False), max_tokens=2
    )
    return [token for run in runs for token in run.tokens]


def exact(sampling: Sampling, answered: list[int]) -> Any:
    """The probabilities of the token after a part of an answer; penalties of the answer only are
    OpenAI's formula.
    """
    text = torch.tensor([[*PROMPT, *answered]])
    scores = torch.tensor(MODEL[int(text[0, -1])], dtype=torch.float64)[None]
    scores = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(text, scores)
    for token, times in Counter(answered).items():
        scores[0, token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.no_repeat_ngram_size:
        scores = hf.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size)(text, scores)
    for warper in (
        hf.TemperatureLogitsWarper(sampling.temperature),
        hf.TopPLogitsWarper(sampling.top_p),
        hf.MinPLogitsWarper(sampling.min_p),
    ):
        scores = warper(text, scores)
    return torch.softmax(scores[0], dim=0).numpy()


def p_value(sampling: Sampling, draws: int) -> float:
    """How likely pairs are whose frequencies are at least as far from the exact ones as those
    found.
    """
    conversation = TableEngine().new_conversation()
    counts = np.zeros((SIZE, SIZE))
    cache = conversation.cache
    assert isinstance(cache, TableCache)
    for seed in range(draws):
        asked = replace(sampling, seed=seed)
        cache.truth = truth = answer(conversation, asked, plain)
        assert answer(conversation, asked, speculative) == truth
        counts[tuple(truth)] += 1
    first = exact(sampling, [])
    second = [exact(sampling, [token]) if p else np.zeros(SIZE) for token, p in enumerate(first)]
    expected = draws * first[:, None] * np.stack(second)
    assert not counts[expected == 0].any()
    return float(chisquare(counts[expected > 0], expected[expected > 0]).pvalue)


@pytest.mark.parametrize("sampling", CASES, ids=range(len(CASES)))
def test_pairs_have_their_exact_probabilities(sampling: Sampling) -> None:
    assert p_value(sampling, 400) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("sampling", CASES, ids=range(len(CASES)))
def test_pairs_have_their_exact_probabilities_in_the_long_run(sampling: Sampling) -> None:
    assert p_value(sampling, 100_000) > 1e-4
