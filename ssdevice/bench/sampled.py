"""Whether sampled answers are the same in all decoding modes.

Compared are their tokens, and the bits of their log-probabilities.

A choice is a pure function of a row of logits, the text before it and a seed, so modes differ only
where their rows do. A difference is a near-tie if the two rows there differ, by at most twice the
largest change of any logit on rows before the differences, and if that change is below the ceiling
of the precision.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from ssdevice.bench.equality import (
    Answer,
    Answerer,
    Asked,
    Comparison,
    Difference,
    Rows,
    first_difference,
)
from ssdevice.bench.modes import FORCED, answer, forcer
from ssdevice.contract import DRAFT
from ssdevice.errors import SSDeviceError
from ssdevice.progress import count
from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.engine import Engine
from ssdevice.runtime.lookup import Lookup, LookupOnly
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE, Advance, plain, speculative
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.sampling.structure import Structure, open_grammar
from ssdevice.text.tokenizer import ChatTokenizer

SAMPLERS: tuple[Sampling, ...] = (
    Sampling(temperature=0.3),
    Sampling(temperature=0.8),
    Sampling(temperature=1.2),
    Sampling(temperature=0.9, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.2, frequency_penalty=0.2),
    Sampling(temperature=0.9, top_k=40, typical_p=0.95, logit_bias={0: 2.0, 1: -2.0}),
)
FORM = Structure.regex("[A-Za-z ,.]{9,400}")
STRUCTURED = Sampling(temperature=1.0, structure=FORM)
"""Needs llguidance, and a tokenizer that it understands."""
SampledCase = tuple[Sequence[int], Sampling, int]
"""A prompt's ids, a sampler and its seed."""


@dataclass
class Sampled(Comparison):
    """The result of ``compare_sampled``, whose prompts are answers.

    ``other_bits``: mode -> how many log-probabilities of equal tokens have other bits than in plain
    decoding. ``exact``: whether that is a fault.
    """

    other_bits: dict[str, int] = field(default_factory=dict)
    exact: bool = False

    def add(self, number: int, mode: str, expected: Answer, found: Answer) -> None:
        same, one, other = first_difference(expected.tokens, found.tokens)
        assert expected.rows is not None and found.rows is not None
        rows = zip(expected.rows, found.rows, strict=False)
        changes = [float(np.abs(row - other_row).max()) for row, other_row in rows]
        if found.tokens != expected.tokens:
            # Equal rows must choose equal tokens, so nothing excuses that they do not.
            margin = math.inf
            if same < len(changes) and changes[same]:
                margin = changes[same]
            self.differences.append(Difference(mode, number, same, one, other, margin))
        self.largest_change = max([self.largest_change or 0.0, *changes[:same]])
        pairs = zip(expected.logprobs[:same], found.logprobs[:same], strict=True)
        self.other_bits[mode] = self.other_bits.get(mode, 0) + sum(a != b for a, b in pairs)

    def faults(self) -> list[str]:
        found = [f"sampled, {fault}" for fault in super().faults()]
        if self.exact:
            for mode, other in self.other_bits.items():
                if other:
                    found.append(
                        f"sampled, {mode}: {count(other, 'log-probability')} with other bits"
                    )
        return found

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {"other_bits": self.other_bits}


def compare_sampled(engine: Engine, tokenizer: ChatTokenizer, asked: Asked, seeds: int) -> Sampled:
    """Sample answers in all modes of an engine whose host can choose.

    ``seeds``: of every sampler with every prompt; 0: one sampler and seed for each prompt, in turn.
    """
    samplers = SAMPLERS
    vocab = engine.geometry.vocab
    stops = tokenizer.stop_ids
    with suppress(SSDeviceError):
        open_grammar(FORM, tokenizer, vocab)
        samplers += (STRUCTURED,)
    if seeds:
        cases = list(product(asked.prompts, samplers, range(seeds)))
    else:
        cases = [
            (ids, samplers[number % len(samplers)], number)
            for number, ids in enumerate(asked.prompts)
        ]
    result = Sampled(
        asked.precision,
        len(cases),
        nodes=engine.geometry.tree.size,
        exact=engine.kernels is not None,
    )
    conversation = engine.new_conversation()

    def sampled(advance: Advance | None) -> Answerer:
        def sample(case: SampledCase, expected: Sequence[int]) -> Answer:
            """A sampled answer with the rows of logits that its tokens were chosen from."""
            ids, sampler, seed = case
            grammar = None
            if sampler.structure is not None:
                grammar = open_grammar(sampler.structure, tokenizer, vocab)
            seeded = replace(sampler, seed=seed, logprobs=0)
            chooser = Chooser(seeded, ids, stops, vocab, grammar, engine.kernels, engine.source)
            rows: list[Rows] = []

            def choose(logits: Rows) -> int:
                rows.append(logits.copy())
                return chooser(logits)

            conversation.chosen_by(chooser)
            conversation.chooser = choose
            mode = advance or forcer(len(ids), expected, result.nodes_ended)
            tokens = answer(conversation, ids, mode, stops, asked.max_tokens)
            logprobs = [each.chosen for each in chooser.logprobs]
            return Answer(tokens, lambda: np.stack(rows), logprobs)

        return sample

    adaptive = Adaptive(Lookup() if DRAFT in engine.functions else LookupOnly())
    others = {SPECULATIVE: sampled(speculative), FORCED: sampled(None), ADAPTIVE: sampled(adaptive)}
    return result.compare("compare sampled answers", cases, sampled(plain), others, asked.report)
