"""What streams would have drafted along given completions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ssdevice.model.step import StreamModel
from ssdevice.ranks import MISS
from ssdevice.train.batches import Sample, collate
from ssdevice.train.loss import IGNORE, LossWeights, StreamingLoss, completion_rows


@torch.no_grad()
def stream_ranks(model: StreamModel, samples: Sequence[Sample], batch: int = 4) -> list[list[list[int]]]:
    """For each sample and completion token i: the ranks ``[γ]`` at which streams 1..γ held tokens i+1..i+γ.

    The streams are those of the row that predicted token i; rank 0 is the likeliest.
    """
    found: list[list[list[int]]] = []
    device = next(model.parameters()).device
    probe = StreamingLoss(model, LossWeights(0.0, 1.0)).to(device)
    for start in range(0, len(samples), batch):
        group = samples[start : start + batch]
        data = collate(group, 0).to(device)
        middle, _, rows = probe.run_main(data.tokens)
        nodes = completion_rows(data.prompts, data.lengths)
        s = probe.run_streams(middle, nodes, data.tokens, rows)
        logits = model.draft_logits(s).float()
        ahead = probe.ahead(data.tokens, nodes, data.lengths).flatten(1)
        wanted = logits.gather(2, ahead.clamp(min=0)[..., None])
        ids = torch.arange(logits.shape[-1], device=device)
        better = (logits > wanted) | ((logits == wanted) & (ids < ahead[..., None]))
        ranks = torch.where(ahead == IGNORE, MISS, better.sum(-1)).reshape(*nodes.shape, model.gamma)
        for row, sample in zip(ranks.tolist(), group, strict=True):
            found.append(row[: len(sample.ids) - sample.prompt])
    return found
