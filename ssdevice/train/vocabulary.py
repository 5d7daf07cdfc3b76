"""Which tokens streams choose among: those that answers are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ssdevice.train.batches import Sample

DEFAULT = 8192
LEAST_FACTOR = 4
"""A vocabulary of less than this many times DEFAULT is used whole: there is little to save."""


def default_size(vocab: int) -> int:
    """How many tokens streams choose among unless asked otherwise; 0: all."""
    return DEFAULT if vocab >= LEAST_FACTOR * DEFAULT else 0


def draft_ids(samples: Sequence[Sample], always: Iterable[int], size: int, vocab: int) -> list[int]:
    """``size`` ids, ascending: ``always``, then the most frequent of completions, then of prompts, then the lowest.

    Answers repeat words of their prompts, and low ids are frequent ones wherever tokens were merged by frequency.
    """
    completions = Counter(token for sample in samples for token in sample.ids[sample.prompt :])
    prompts = Counter(token for sample in samples for token in sample.ids[: sample.prompt])
    order = dict.fromkeys(token for token in always if token < vocab)
    for counted in (completions, prompts):
        order |= dict.fromkeys(token for token, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0])))
    order |= dict.fromkeys(range(vocab))
    return sorted(list(order)[:size])


def covered(samples: Sequence[Sample], ids: Sequence[int]) -> float:
    """The share of completion tokens that are in the list."""
    known = set(ids)
    tokens = [token for sample in samples for token in sample.ids[sample.prompt :]]
    return sum(token in known for token in tokens) / max(1, len(tokens))
