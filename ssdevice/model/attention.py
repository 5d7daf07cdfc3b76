"""Attention over several separate runs of key/value rows, registered as Hugging Face attention functions.

Past rows, tree rows and stream rows are never concatenated: scores against each run are computed on their own and
joined, so the cache is read in place. Keys and values are lists of ``[batch, kv_heads, rows, head_dim]``.

Under the name ``JOINED`` values are concatenated, keys are not. Where every result is rounded to half precision, sums
over past and over new rows would else be rounded apart, and a drafted row, whose ancestors are new, would be another
than the same row in plain decoding, whose ancestors are past.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "ssdevice"
JOINED = "ssdevice_joined"
MASKED = -1e9
"""Additive mask of an invisible row; targets that compute in half precision replace it (see ``mask_value``)."""

KeyValue = tuple[Tensor, Tensor]


class Rows:
    """The cache object Hugging Face layers see: keeps the new rows of each layer, offers them after the past ones.

    ``past[i]``: runs of committed rows of layer i, each (keys, values). After the layers ran, ``new[i]`` holds what
    layer i computed, ``[batch, kv_heads, rows, head_dim]`` each.
    """

    is_compileable = False

    def __init__(self, past: Sequence[Sequence[KeyValue]]) -> None:
        self.past = past
        self.new: list[KeyValue | None] = [None] * len(past)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[list[Tensor], list[Tensor]]:
        """Called by the layer's attention with its new rows; the result is what ``attend`` receives."""
        self.new[layer] = (keys, values)
        runs = [*self.past[layer], (keys, values)]
        return [run[0] for run in runs], [run[1] for run in runs]

    def rows(self, layer: int) -> KeyValue:
        """The new rows of a layer that ran."""
        kept = self.new[layer]
        if kept is None:
            raise RuntimeError(f"layer {layer} did not run")
        return kept


def apart(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """``weights [.., R, sum of run lengths]`` times the runs, one after another."""
    out: Tensor | None = None
    start = 0
    for value in values:
        end = start + value.shape[2]
        part = torch.matmul(weights[..., start:end] if len(values) > 1 else weights, value)
        out = part if out is None else out + part
        start = end
    assert out is not None
    return out


def together(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The same as one product: a sum over every row that is rounded once."""
    return torch.matmul(weights, torch.cat(list(values), dim=2) if len(values) > 1 else values[0])


def attend(
    module: nn.Module,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    weigh: Callable[[Tensor, Sequence[Tensor]], Tensor] = apart,
    **_: object,
) -> tuple[Tensor, None]:
    """Grouped-query attention of ``query [B, heads, Q, hd]`` over runs of rows.

    ``attention_mask``: additive, ``[B or 1, 1, Q, sum of run lengths]``. ``weigh``: how values are summed up. Heads of
    one group share their keys by being rows of one matrix product. Returns ``[B, Q, heads, hd]``.
    """
    batch, heads, rows, dim = query.shape
    kv_heads = keys[0].shape[1]
    groups = heads // kv_heads
    q = (query * (dim**-0.5 if scaling is None else scaling)).reshape(batch, kv_heads, groups * rows, dim)
    parts = [torch.matmul(q, k.transpose(2, 3)) for k in keys]
    scores = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    scores = scores.reshape(batch, kv_heads, groups, rows, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + attention_mask[:, :, None], dim=-1).to(query.dtype)
    weights = weights.reshape(batch, kv_heads, groups * rows, -1)
    out = weigh(weights, values)
    return out.reshape(batch, heads, rows, dim).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
AttentionInterface.register(JOINED, partial(attend, weigh=together))
