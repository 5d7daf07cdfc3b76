"""How many tokens a tree gives a step, computed from the ranks at which streams held what came next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ssdevice.tree import Ranks, Tree

MISS = 1 << 20
"""Rank of a token that was no candidate, or that does not exist because the answer ended."""
AnswerRanks = Sequence[Sequence[int]]
"""Of one answer, by token i: the ranks ``[γ]`` at which streams 1..γ held tokens i+1..i+γ."""


def count_paths(answers: Sequence[AnswerRanks], width: int = MISS) -> Counter[Ranks]:
    """How often each rank path occurred, cut before the first rank of ``width`` or more: see Tree.from_counts."""
    paths: Counter[Ranks] = Counter()
    for answer in answers:
        for row in answer:
            end = next((j for j, rank in enumerate(row) if rank >= width), len(row))
            paths[tuple(row[:end])] += 1
    return paths


def tokens_per_step(answers: Sequence[AnswerRanks], tree: Tree) -> float:
    """β of decoding these answers with ``tree``: tokens emitted by steps over steps."""
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
