"""Main rows of a frozen base, kept between epochs: nothing in them is trained, so they never change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssdevice.model.attention import KeyValue
from ssdevice.train.batches import Batch, Sample
from ssdevice.train.loss import StreamingLoss

Rows = tuple[Tensor, Tensor | None, list[KeyValue]]
"""What ``StreamingLoss.run_main`` gives; None for final states from which no stream learns."""


class MainRows:
    """Rows by sample in CPU memory, up to ``limit`` bytes; what does not fit is recomputed each time."""

    def __init__(self, loss: StreamingLoss, limit: int) -> None:
        self.loss, self.left = loss, limit
        self.kept: dict[Sample, list[Tensor]] = {}

    @torch.no_grad()
    def of(self, samples: Sequence[Sample], batch: Batch) -> Rows:
        """The main rows of ``batch``, which is ``samples`` collated."""
        if not all(sample in self.kept for sample in samples):
            middle, final, rows = self.loss.run_main(batch.tokens)
            self._keep(samples, [middle, *([final] if self.loss.weights.soft else ()), *chain.from_iterable(rows)])
            return middle, final, rows
        width = batch.tokens.shape[1]
        middle, *flat = (
            # Rows beyond a sample's length are always masked.
            torch.stack([pad(part, (0, 0, 0, width - part.shape[-2])) for part in parts]).to(batch.tokens.device)
            for parts in zip(*(self.kept[sample] for sample in samples), strict=True)
        )
        kept = flat.pop(0) if self.loss.weights.soft else None
        return middle, kept, list(zip(flat[::2], flat[1::2], strict=True))

    def _keep(self, samples: Sequence[Sample], parts: Sequence[Tensor]) -> None:
        """Keep the rows of each sample in ``parts``, all ``[B, .., S, n]``."""
        for i, sample in enumerate(samples):
            mine = [part[i, ..., : len(sample.ids), :] for part in parts]
            size = sum(part.numel() * part.element_size() for part in mine)
            if sample not in self.kept and size <= self.left:
                self.left -= size
                self.kept[sample] = [part.to("cpu", copy=True) for part in mine]
