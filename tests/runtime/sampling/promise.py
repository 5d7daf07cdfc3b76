"""The promise of sampling, for any engine: drafts that are planted on every path change no token of
a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine
from ssdevice.runtime.loop import Advance, decode, plain, speculative
from ssdevice.runtime.sampling.choice import Chooser, Logprobs
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.text.stream import Emission

SAMPLERS = (
    Sampling(temperature=0.3, logprobs=2),
    Sampling(temperature=0.8, logprobs=2),
    Sampling(temperature=1.2, top_p=0.9, logprobs=2),
    Sampling(temperature=0.9, min_p=0.05, repetition_penalty=1.3, logprobs=2),
    Sampling(temperature=0.7, top_k=5, presence_penalty=0.5, frequency_penalty=0.5, logprobs=2),
    Sampling(repetition_penalty=1.3, no_repeat_ngram_size=3, logprobs=2),
    Sampling(
        temperature=1.0, logit_bias={5: 3.0, 7: -3.0}, min_new_tokens=30, suppress=(9,), logprobs=2
    ),
)
Force = Callable[[Conversation, Sequence[int]], None]


def answer(
    engine: Engine,
    sampling: Sampling,
    prompt: Sequence[int],
    advance: Advance,
    force: Force | None = None,
) -> tuple[list[int], Chooser, list[int]]:
    """Tokens up to the end of the context, their chooser, and how many each call emitted; no token
    stops them.
    """
    conversation = engine.new_conversation()
    conversation.chooser = chooser = Chooser(sampling, prompt, [0], engine.geometry.vocab)
    tokens: list[int] = []

    def accept(run: Sequence[int]) -> Emission:
        tokens.extend(run)
        return Emission("", len(run), False)

    def forced(held: Conversation, last: int) -> Sequence[int]:
        if force is not None:
            force(held, tokens)
        return advance(held, last)

    return (
        tokens,
        chooser,
        [len(run.tokens) for run in decode(conversation, prompt, forced, accept, 1000)],
    )


def agree(found: list[Logprobs], expected: list[Logprobs], exactly: bool = False) -> None:
    if exactly:
        assert found == expected
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids and one.values == pytest.approx(other.values, abs=1e-3)
        assert one.chosen == pytest.approx(other.chosen, abs=1e-3)


def check_forced_drafts(
    engine: Engine, sampling: Sampling, seeds: int = 3, exactly: bool = False
) -> set[int]:
    """The tokens of plain decoding are planted on one path after another, with wrong ids around
    them.

    ``exactly``: a node's logits have the bits of plain decoding. Returns how many tokens single
    calls emitted.
    """
    g = engine.geometry
    ends = set()
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        prompt = draw.integers(1, g.vocab, int(draw.integers(1, 1 + g.context // 4))).tolist()
        chosen = Sampling(**{**vars(sampling), "seed": seed})
        truth, expected, _ = answer(engine, chosen, prompt, plain)
        assert len(prompt) + len(truth) == g.context + 1

        def force(held: Conversation, so_far: Sequence[int]) -> None:
            path = g.tree.paths[draw.integers(g.tree.size)]  # noqa: B023  called in this turn
            right = [*truth[len(so_far) :], *[1] * g.gamma]  # noqa: B023
            held.drafts[...] = draw.integers(0, g.vocab, held.drafts.shape)  # noqa: B023
            for depth, rank in enumerate(path):
                held.drafts[depth] = (right[depth] + 1) % g.vocab
                held.drafts[depth, rank] = right[depth]

        for how in (force, None):
            tokens, chooser, counts = answer(engine, chosen, prompt, speculative, how)
            assert tokens == truth
            agree(chooser.logprobs[: len(truth)], expected.logprobs, exactly)
            ends |= set(counts)
    return ends
