"""What streams would have drafted along given continuations, and what a tree would have accepted of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ssdevice.model.step import StreamModel
from ssdevice.train.batches import Sample, collate
from ssdevice.train.loss import IGNORE, LossWeights, StreamingLoss, completion_rows, targets
from ssdevice.tree import Ranks, Tree

MISS = 1 << 20
"""Rank of a token that does not exist (the sequence ended)."""


@torch.no_grad()
def stream_ranks(model: StreamModel, samples: Sequence[Sample], batch: int = 16) -> list[list[list[int]]]:
    """For each sample and completion token i: the ranks ``[γ]`` at which streams 1..γ held tokens i+1..i+γ.

    The streams are those of the row that predicted token i; rank 0 is the likeliest.
    """
    found: list[list[list[int]]] = []
    probe = StreamingLoss(model, LossWeights(0.0, 1.0))
    for start in range(0, len(samples), batch):
        group = samples[start : start + batch]
        data = collate(group, 0)
        middle, _, rows = probe.run_main(data.tokens)
        nodes = completion_rows(data.prompts, data.lengths)
        s = probe.run_streams(middle, nodes, data.tokens.shape[1], rows)
        logits = model.backbone.head(s)
        ahead = torch.stack([targets(data.tokens, nodes, data.lengths, j + 2) for j in range(model.gamma)], -1)
        ahead = ahead.flatten(1)
        wanted = logits.gather(2, ahead.clamp(min=0)[..., None])
        ids = torch.arange(logits.shape[-1])
        better = (logits > wanted) | ((logits == wanted) & (ids < ahead[..., None]))
        ranks = torch.where(ahead == IGNORE, MISS, better.sum(-1)).reshape(*nodes.shape, model.gamma)
        for row, sample in zip(ranks.tolist(), group, strict=True):
            found.append(row[: len(sample.ids) - sample.prompt])
    return found


def count_paths(ranks: Sequence[Sequence[Sequence[int]]], width: int) -> Counter[Ranks]:
    """How often each rank path occurred, cut before the first rank of ``width`` or more: see Tree.from_counts."""
    paths: Counter[Ranks] = Counter()
    for sample in ranks:
        for row in sample:
            end = next((j for j, rank in enumerate(row) if rank >= width), len(row))
            paths[tuple(row[:end])] += 1
    return paths


def tokens_per_step(ranks: Sequence[Sequence[Sequence[int]]], tree: Tree) -> float:
    """β of decoding these continuations with ``tree``: tokens emitted by steps over steps."""
    known = set(tree.paths)
    emitted = steps = 0
    for sample in ranks:
        at, last = 0, len(sample) - 1
        while at < last:
            depth = 0
            while depth < tree.depth and tuple(sample[at][: depth + 1]) in known:
                depth += 1
            taken = min(depth + 1, last - at)
            at += taken
            emitted += taken
            steps += 1
    return emitted / max(steps, 1)
