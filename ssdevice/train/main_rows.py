"""Main rows of a frozen base, kept between epochs: nothing in them is trained, so they never change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssdevice.model.attention import KeyValue
from ssdevice.train.batches import Batch, Sample
from ssdevice.train.loss import StreamingLoss

Rows = tuple[Tensor, list[KeyValue]]
"""Hidden states ``[B, S, D]`` at layer N - N_s and the MSA layers' (keys, values), as ``StreamingLoss`` takes them."""


class MainRows:
    """Rows by sample in CPU memory, up to ``limit`` bytes; what does not fit is recomputed each time."""

    def __init__(self, loss: StreamingLoss, limit: int) -> None:
        self.loss, self.left = loss, limit
        self.kept: dict[Sample, Tensor] = {}

    @torch.no_grad()
    def of(self, samples: Sequence[Sample], batch: Batch) -> Rows:
        """The main rows of ``batch``, which is ``samples`` collated."""
        found = [self.kept.get(sample) for sample in samples]
        if any(rows is None for rows in found):
            middle, _, rows = self.loss.run_main(batch.tokens)
            self._keep(samples, middle, rows)
            return middle, rows
        width = batch.tokens.shape[1]
        # Rows beyond a sample's length are always masked.
        joined = torch.stack([pad(rows, (0, 0, 0, width - len(rows))) for rows in found if rows is not None])
        return self._split(joined.to(batch.tokens.device))

    def _keep(self, samples: Sequence[Sample], middle: Tensor, rows: list[KeyValue]) -> None:
        flat = [part.transpose(1, 2).flatten(2).to(middle.dtype) for pair in rows for part in pair]
        joined = torch.cat([middle, *flat], dim=2)
        for i, sample in enumerate(samples):
            size = len(sample.ids) * joined.shape[2] * joined.element_size()
            if sample not in self.kept and size <= self.left:
                self.left -= size
                self.kept[sample] = joined[i, : len(sample.ids)].to("cpu", copy=True)

    def _split(self, joined: Tensor) -> Rows:
        backbone = self.loss.model.backbone
        row = backbone.kv_heads * backbone.head_dim
        layers = backbone.num_layers - self.loss.model.first_msa
        sizes = [joined.shape[2] - 2 * layers * row, *[row] * (2 * layers)]
        middle, *flat = torch.split(joined, sizes, dim=2)
        heads = backbone.kv_heads, backbone.head_dim
        parts = [part.reshape(*part.shape[:2], *heads).transpose(1, 2) for part in flat]
        return middle, list(zip(parts[::2], parts[1::2], strict=True))
