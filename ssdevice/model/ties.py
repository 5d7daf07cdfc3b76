"""The choices of a step, in which ties go to the lowest id on every target."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(scores: Tensor) -> Tensor:
    """Index of the largest value in the last dimension as int32; the lowest index wins a tie."""
    return torch.argmax(scores, dim=-1).to(torch.int32)


def top_k(scores: Tensor, k: int) -> Tensor:
    """The k largest of ``[R, V]`` as ids ``[R, k]``, best first; the lowest id wins a tie.

    This takes k rounds of argmax: torch's topk does not define the order of ties, and some targets turn it into a sort.
    """
    ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    taken: list[Tensor] = []
    for _ in range(k):
        best = argmax(scores)[:, None]
        taken.append(best)
        scores = torch.where(ids[None] == best, torch.finfo(scores.dtype).min, scores)
    return torch.cat(taken, dim=1)
