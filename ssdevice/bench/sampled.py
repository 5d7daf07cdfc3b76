"""Whether sampled answers are the same in all decoding modes: their tokens, and the bits of their log-probabilities.

A choice is a pure function of a row of logits, the text before it and a seed. So modes differ only where their rows do.
A difference counts as a near-tie if the two rows there differ, and by at most twice the largest change of any logit on
rows before the differences, which is below the ceiling of the precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.bench.equality import FORCED, Difference, Equality, answer, first_difference, forcer
from ssdevice.bundle.manifest import Precision
from ssdevice.contract import DRAFT
from ssdevice.errors import SSDeviceError
from ssdevice.progress import Report, count, track
from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine
from ssdevice.runtime.lookup import Lookup, LookupOnly
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE, Advance, plain, speculative
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.structure.grammar import open_grammar
from ssdevice.runtime.structure.options import Structure
from ssdevice.text.tokenizer import ChatTokenizer

SAMPLERS = (
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


@dataclass
class Sampled(Equality):
    """The result of ``compare_sampled``, whose prompts are answers.

    ``other_bits``: mode -> how many log-probabilities of equal tokens have other bits than in plain decoding.
    ``exact``: none may have.
    """

    other_bits: dict[str, int] = field(default_factory=dict)
    exact: bool = False

    def faults(self) -> list[str]:
        """What breaks the promise, one sentence each."""
        found = [f"sampled, {fault}" for fault in super().faults()]
        if self.exact:
            wrong = ((mode, other) for mode, other in self.other_bits.items() if other)
            found += [f"sampled, {mode}: {count(other, 'log-probability')} with other bits" for mode, other in wrong]
        return found

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {"other_bits": self.other_bits}

    def describe(self) -> list[str]:
        """The result for readers."""
        lines = [f"sampled: {count(self.prompts, 'answer')}, {count(self.tokens, 'token')}, in plain decoding"]
        for mode, other in self.other_bits.items():
            equal = self.prompts - sum(d.mode == mode for d in self.differences)
            bits = f"{count(other, 'log-probability')} with other bits" if other else "log-probabilities to the bit"
            lines.append(f"sampled, {mode}: {equal} of {self.prompts} answers equal to plain decoding, {bits}")
        if self.largest_change:
            lines.append(f"sampled: logits change by at most {self.largest_change:.3g} (ceiling {self.ceiling})")
        return lines


def compare_sampled(
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    precision: Precision,
    seeds: int,
    report: Report,
) -> Sampled:
    """Sample answers in all modes of an engine whose host can choose. ``seeds``: of every sampler with every prompt;
    0: one sampler and seed for each prompt, in turn."""
    samplers = _samplers(tokenizer, engine.geometry.vocab)
    cases = list(product(prompts, samplers, range(seeds)))
    if not seeds:
        cases = [(ids, samplers[number % len(samplers)], number) for number, ids in enumerate(prompts)]
    modes: dict[str, Advance] = {SPECULATIVE: speculative, FORCED: speculative}
    modes[ADAPTIVE] = Adaptive(Lookup() if DRAFT in engine.functions else LookupOnly())
    result = Sampled(precision, len(cases), modes=list(modes), nodes=engine.geometry.tree.size, exact=engine.kernels)
    result.other_bits = dict.fromkeys(modes, 0)
    result.largest_change = 0.0
    conversation = engine.new_conversation()
    for number, (ids, sampler, seed) in enumerate(track(report, "compare sampled answers", cases)):
        asked = replace(sampler, seed=seed, logprobs=0)
        expected = _Answer(conversation, tokenizer, ids, plain, asked, max_tokens)
        result.tokens += len(expected.tokens)
        for name, advance in modes.items():
            chosen = forcer(len(ids), expected.tokens, result.nodes_ended) if name == FORCED else advance
            _compare(result, number, name, expected, _Answer(conversation, tokenizer, ids, chosen, asked, max_tokens))
    return result


def _samplers(tokenizer: ChatTokenizer, vocab: int) -> tuple[Sampling, ...]:
    try:
        open_grammar(FORM, tokenizer, vocab)
    except SSDeviceError:
        return SAMPLERS
    return (*SAMPLERS, STRUCTURED)


class _Answer:
    """A sampled answer: ``tokens``, their log-probabilities, and the rows of logits that they were chosen from."""

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: ChatTokenizer,
        ids: Sequence[int],
        advance: Advance,
        sampling: Sampling,
        max_tokens: int,
    ) -> None:
        vocab, structure = conversation.geometry.vocab, sampling.structure
        grammar = open_grammar(structure, tokenizer, vocab) if structure is not None else None
        self._chooser = Chooser(sampling, ids, tokenizer.stop_ids, vocab, grammar)
        self.rows: list[NDArray[np.float32]] = []
        conversation.chosen_by(self._chooser)
        conversation.chooser = self._choose
        self.tokens = answer(conversation, ids, advance, tokenizer.stop_ids, max_tokens)
        self.logprobs = [each.chosen for each in self._chooser.logprobs]

    def _choose(self, logits: NDArray[np.float32]) -> int:
        self.rows.append(logits.copy())
        return self._chooser(logits)


def _compare(result: Sampled, number: int, mode: str, expected: _Answer, found: _Answer) -> None:
    same = len(expected.tokens)
    if found.tokens != expected.tokens:
        same, one, other = first_difference(expected.tokens, found.tokens)
        there = [float(np.max(np.abs(a - b))) for a, b in zip(expected.rows[same:], found.rows[same:], strict=False)]
        margin = there[0] if there and there[0] else math.inf  # equal rows must lead to equal tokens
        result.differences.append(Difference(mode, number, same, one, other, margin))
    changes = (np.max(np.abs(a - b)) for a, b in zip(expected.rows[:same], found.rows[:same], strict=True))
    result.largest_change = max(result.largest_change or 0.0, *map(float, changes), 0.0)
    pairs = zip(expected.logprobs[:same], found.logprobs[:same], strict=True)
    result.other_bits[mode] += sum(a != b for a, b in pairs)
