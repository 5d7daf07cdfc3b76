"""Reference decoding: transformers' greedy tokens, the same with drafting, and one rule for where
an answer ends.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ssdevice.config import Schedule, StreamConfig
from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.export.parity.reference import Cache
from ssdevice.model.loading import build
from ssdevice.model.step import Past, Step
from ssdevice.tree import Tree
from tests.conformance.oracle import force_drafts, force_everywhere
from tests.model.reference import Reference, until
from tests.model.tiny import VOCAB, tiny_model

CONTEXT = 40
GAMMA = 3
K = 2
TREE = Tree.full(2, 3)
PROMPT = torch.randint(0, VOCAB, (13,), generator=torch.Generator().manual_seed(3)).tolist()
BASE = tiny_model("llama")


class WatchedReference(Reference):
    """A Reference that keeps the cache of its last answer, and can be given oracle drafts."""

    def __init__(self, schedule: Schedule, context: int = CONTEXT) -> None:
        model = build(copy.deepcopy(BASE), StreamConfig(gamma=GAMMA, msa_layers=2), context).eval()
        super().__init__(model, TREE, K, schedule, context, chunk=5)
        self.cache: Cache | None = None

    def new_cache(self) -> Cache:
        self.cache = super().new_cache()
        return self.cache

    def draft_from(self, prompt: Sequence[int], truth: Sequence[int], seed: int | None) -> None:
        """From now on drafts are right along a random path (``seed``) or everywhere (None)."""
        step = self.step
        rng = random.Random(seed)

        def oracle(root: Tensor, drafts: Tensor, length: Tensor, past: Past) -> Step:
            ahead = truth[int(length) - len(prompt) + 1 :]
            if seed is None:
                given = force_everywhere(K, GAMMA, ahead, VOCAB, rng)
            else:
                node = rng.choice([n for n in range(TREE.size) if TREE.depths[n] <= len(ahead)])
                given = force_drafts(TREE, K, GAMMA, ahead, node, VOCAB, rng)
            out: Step = step(root, torch.tensor(given, dtype=torch.int32), length, past)
            return out

        self.step = oracle  # type: ignore[assignment]


def test_plain_decoding_is_transformers_greedy_generation() -> None:
    expected = BASE.generate(
        torch.tensor([PROMPT]), max_new_tokens=CONTEXT - 13, do_sample=False, pad_token_id=0
    )
    tokens = WatchedReference(Schedule.DEFERRED).plain(PROMPT, CONTEXT - 13).tokens
    assert tokens == expected[0, 13:].tolist()
    assert len(set(tokens)) > 5


@pytest.mark.parametrize("schedule", list(Schedule))
def test_own_drafts_change_no_token(schedule: Schedule) -> None:
    reference = WatchedReference(schedule)
    assert reference.speculative(PROMPT, 100).tokens == reference.plain(PROMPT, 100).tokens


@pytest.mark.parametrize("prompt_length", [1, 4, 5, 6, 13, CONTEXT - 2, CONTEXT - 1, CONTEXT])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_full_context_ends_both_at_the_same_token(prompt_length: int, seed: int | None) -> None:
    prompt = (PROMPT * 4)[:prompt_length]
    reference = WatchedReference(Schedule.FUSED)
    plain = reference.plain(prompt, 10**6)
    assert len(plain.tokens) == 1 + CONTEXT - prompt_length
    reference.draft_from(prompt, plain.tokens, seed)
    result = reference.speculative(prompt, 10**6)
    assert result.tokens == plain.tokens
    assert sum(result.steps) == len(result.tokens) - 1
    assert reference.cache is not None and reference.cache.length == CONTEXT
    if seed is None and prompt_length < CONTEXT - TREE.emitted:
        assert result.steps[0] == TREE.emitted  # the drafts were accepted at all


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_ends_both_at_the_same_token(max_tokens: int) -> None:
    reference = WatchedReference(Schedule.DEFERRED)
    truth = reference.plain(PROMPT, 100).tokens
    reference.draft_from(PROMPT, truth, None)
    plain = reference.plain(PROMPT, max_tokens)
    result = reference.speculative(PROMPT, max_tokens)
    assert result.tokens == plain.tokens == truth[:max_tokens]
    assert sum(result.steps) == max_tokens - 1
    assert reference.cache is not None and reference.cache.length == len(PROMPT) + max_tokens - 1


@pytest.mark.parametrize("place", range(10))
def test_a_stop_token_ends_both_even_inside_an_accepted_run(place: int) -> None:
    reference = WatchedReference(Schedule.DEFERRED)
    truth = reference.plain(PROMPT, 100).tokens
    stop = (truth[place], VOCAB - 1)
    reference.draft_from(PROMPT, truth, None)
    plain = reference.plain(PROMPT, 100, stop)
    result = reference.speculative(PROMPT, 100, stop)
    assert result.tokens == plain.tokens == truth[: truth.index(truth[place]) + 1]
    # The stop token is not committed: a next turn's prefill begins with it.
    assert (
        reference.cache is not None
        and reference.cache.length == len(PROMPT) + len(result.tokens) - 1
    )


def test_an_answer_continues_from_its_committed_rows() -> None:
    reference = WatchedReference(Schedule.FUSED)
    truth = reference.plain(PROMPT, 100).tokens
    reference.draft_from(PROMPT, truth, None)
    first = reference.speculative(PROMPT, 7).tokens
    assert reference.cache is not None
    root, _ = reference.start([first[-1], 3, 4], reference.cache)
    again, _ = reference.start([*PROMPT, *first, 3, 4], reference.new_cache())
    assert root == again


def test_prompts_that_cannot_be_used_are_refused() -> None:
    reference = WatchedReference(Schedule.DEFERRED)
    with pytest.raises(InputError, match="the prompt is empty"):
        reference.plain([], 5)
    with pytest.raises(
        ContextOverflowError,
        match="the prompt has 41 tokens, but of a context of 40 only 40 are left",
    ):
        reference.speculative([1] * (CONTEXT + 1), 5)


def test_until_keeps_the_first_stop_token() -> None:
    assert until([4, 5, 6], (5, 6)) == [4, 5]
    assert until([4, 5, 6], ()) == [4, 5, 6]
