"""The draft vocabulary: the tokens that streams choose among, which are those that answers use most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ssdevice.train.batches import Sample

DEFAULT = 8192
LEAST_FACTOR = 4
"""A vocabulary smaller than this many times DEFAULT is used whole, because there is little to save."""


def default_size(vocab: int) -> int:
    """The default number of tokens that streams choose among; 0: all."""
    return DEFAULT if vocab >= LEAST_FACTOR * DEFAULT else 0


def draft_ids(samples: Sequence[Sample], always: Iterable[int], size: int, vocab: int) -> list[int]:
    """``size`` ascending ids: ``always``, then the most frequent in completions, then in prompts, then the lowest.

    Answers repeat words of their prompts, and low ids are frequent if tokens were merged by frequency.
    """
    completions = Counter(token for sample in samples for token in sample.ids[sample.prompt :])
    prompts = Counter(token for sample in samples for token in sample.ids[: sample.prompt])
    order = dict.fromkeys(token for token in always if token < vocab)
    for counted in (completions, prompts):
        order |= dict.fromkeys(token for token, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0])))
    order |= dict.fromkeys(range(vocab))
    return sorted(list(order)[:size])


def covered(samples: Sequence[Sample], ids: Sequence[int]) -> float:
    """The share of completion tokens that are in ``ids``."""
    known = set(ids)
    tokens = [token for sample in samples for token in sample.ids[sample.prompt :]]
    return sum(token in known for token in tokens) / max(1, len(tokens))
