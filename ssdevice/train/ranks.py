"""What streams would have drafted along given completions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
        logits = _draft_logits(model, s, data.tokens, nodes.clamp(min=0)).float()
        ahead = probe.ahead(data.tokens, nodes, data.lengths).flatten(1)
        wanted = logits.gather(2, ahead.clamp(min=0)[..., None])
        ids = torch.arange(logits.shape[-1], device=device)
        better = (logits > wanted) | ((logits == wanted) & (ids < ahead[..., None]))
        ranks = torch.where(ahead == IGNORE, MISS, better.sum(-1)).reshape(*nodes.shape, model.gamma)
        for row, sample in zip(ranks.tolist(), group, strict=True):
            found.append(row[: len(sample.ids) - sample.prompt])
    return found


def _draft_logits(model: StreamModel, s: Tensor, tokens: Tensor, nodes: Tensor) -> Tensor:
    """Logits ``[B, n * γ, V]`` of streams ``[B, n * γ, D]``; where drafts follow each other, along the likeliest."""
    finished = model.backbone.finish(s)
    if model.streams is None or model.streams.follow is None:
        return model.draft_logits(finished)
    before, logits = tokens.gather(1, nodes + 1), list[Tensor]()
    for j, row in enumerate(finished.reshape(*nodes.shape, model.gamma, -1).unbind(2), 1):
        logits.append(model.draft_logits(model.streams.after(row, model.backbone.embed(before, nodes + j))))
        before = model.draft_tokens(logits[-1].argmax(-1))
    return torch.stack(logits, dim=2).flatten(1, 2)
