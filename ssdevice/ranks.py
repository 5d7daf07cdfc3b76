"""Computes the tokens per step of any draft tree from the ranks that the true tokens had in the streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ssdevice.tree import Ranks, Tree

MISS = 1 << 20
"""Rank of a token that was no candidate, or that does not exist because the answer ended."""
AnswerRanks = Sequence[Sequence[int]]
"""For each token i of an answer: the ranks ``[γ]`` of tokens i+1..i+γ in streams 1..γ."""


def count_paths(answers: Sequence[AnswerRanks]) -> Counter[Ranks]:
    """How often each rank path occurred, cut before the first MISS: see Tree.from_counts."""
    paths: Counter[Ranks] = Counter()
    for answer in answers:
        for row in answer:
            end = next((j for j, rank in enumerate(row) if rank >= MISS), len(row))
            paths[tuple(row[:end])] += 1
    return paths


def tokens_per_step(answers: Sequence[AnswerRanks], tree: Tree) -> float:
    """β for these answers with ``tree``: tokens emitted by steps over steps."""
    known = set(tree.paths)
    emitted = steps = 0
    for answer in answers:
        at, last = 0, len(answer) - 1
        while at < last:
            depth = 0
            while depth < tree.depth and tuple(answer[at][: depth + 1]) in known:
                depth += 1
            taken = min(depth + 1, last - at)
            at, emitted, steps = at + taken, emitted + taken, steps + 1
    return emitted / max(steps, 1)
