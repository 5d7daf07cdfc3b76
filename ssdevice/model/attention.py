"""Attention over several separate runs of key/value rows, and the one function Hugging Face layers call for it.

Past rows, tree rows and stream rows are never concatenated: scores against each run are computed on their own and
joined, so the cache is read in place. Keys and values are lists of ``[batch, kv_heads, rows, head_dim]``.

A target may attend in another way: ``Rows`` carries the ``Attention`` to the layers (``ssdevice.model.operators``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "ssdevice"
MASKED = -1e9
"""Additive mask of an invisible row; targets that compute in half precision take another (``Operators.mask_value``)."""

KeyValue = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Grouped-query attention of ``query [B, heads, Q, hd]`` over runs of rows: ``[B, Q, heads, hd]``.

    ``mask``: additive, ``[B or 1, 1, Q, sum of run lengths]``. ``positions``: ``[B or 1, Q]``, of the query rows.
    ``softcap``: bound of a tanh over the scores.
    """

    def __call__(
        self,
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        mask: Tensor,
        positions: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor: ...


class Rows:
    """The cache object Hugging Face layers see: keeps the new rows of each layer, offers them after the past ones.

    ``past[i]``: runs of committed rows of layer i, each (keys, values). ``positions``: of the rows that run.
    After the layers ran, ``new[i]`` holds what layer i computed, ``[batch, kv_heads, rows, head_dim]`` each.
    """

    is_compileable = False

    def __init__(self, past: Sequence[Sequence[KeyValue]], positions: Tensor, attention: Attention) -> None:
        self.past, self.positions, self.attention = past, positions, attention
        self.new: list[KeyValue | None] = [None] * len(past)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Runs, list[Tensor]]:
        """Called by the layer's attention with its new rows; the result is what ``_attend_rows`` receives."""
        self.new[layer] = (keys, values)
        runs = [*self.past[layer], (keys, values)]
        return Runs(self, [run[0] for run in runs]), [run[1] for run in runs]

    def rows(self, layer: int) -> KeyValue:
        """The new rows of a layer that ran."""
        kept = self.new[layer]
        if kept is None:
            raise RuntimeError(f"layer {layer} did not run")
        return kept


class Runs(list[Tensor]):
    """The runs of keys on their way through a layer's own code, with the ``Rows`` they are of."""

    def __init__(self, rows: Rows, keys: Sequence[Tensor]) -> None:
        super().__init__(keys)
        self.rows = rows


def attend(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """See Attention. Heads of one group share their keys by being rows of one matrix product."""
    weights = _weights(query, keys, mask, scale, softcap)
    out: Tensor | None = None
    start = 0
    for value in values:
        end = start + value.shape[2]
        part = torch.matmul(weights[..., start:end] if len(values) > 1 else weights, value)
        out = part if out is None else out + part
        start = end
    assert out is not None
    return out.reshape(query.shape).transpose(1, 2)


def attend_once(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """See Attention; values are concatenated, keys are not: a sum over every row that is rounded once.

    Where every result is rounded to half precision, sums over past and over new rows would else be rounded one by one.
    A drafted row, whose ancestors are new, would then differ from the same row in plain decoding, whose ancestors are
    past.
    """
    weights = _weights(query, keys, mask, scale, softcap)
    joined = torch.cat(list(values), dim=2) if len(values) > 1 else values[0]
    return torch.matmul(weights, joined).reshape(query.shape).transpose(1, 2)


def _weights(query: Tensor, keys: Sequence[Tensor], mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Softmax of the scores, ``[B, kv_heads, group * Q, sum of run lengths]``."""
    batch, heads, rows, dim = query.shape
    kv_heads = keys[0].shape[1]
    groups = heads // kv_heads
    q = (query * scale).reshape(batch, kv_heads, groups * rows, dim)
    parts = [torch.matmul(q, k.transpose(2, 3)) for k in keys]
    scores = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    scores = scores.reshape(batch, kv_heads, groups, rows, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + mask[:, :, None], dim=-1).to(query.dtype)
    return weights.reshape(batch, kv_heads, groups * rows, -1)


def _attend_rows(
    module: nn.Module,
    query: Tensor,
    keys: Runs,
    values: Sequence[Tensor],
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What Hugging Face layers call: the ``Attention`` of the ``Rows`` that their cache is."""
    rows, scale = keys.rows, query.shape[-1] ** -0.5 if scaling is None else scaling
    return rows.attention(query, keys, values, attention_mask, rows.positions, scale, softcap), None


AttentionInterface.register(NAME, _attend_rows)
