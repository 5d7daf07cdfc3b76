"""Attention for training: streams see main rows and, of all other streams, only those of their own node.

The default computes every stream's scores against every stream of the batch and masks all but γ of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ssdevice.model.attention import Attending
from ssdevice.model.step import StreamModel


@contextmanager
def attending_by_node(model: StreamModel) -> Iterator[None]:
    """In this context ``model.stream_pass`` with one run of main rows computes the same with less work."""
    backbone, before = model.backbone, model.backbone.operators
    backbone.operators = replace(before, attention=partial(attend_by_node, gamma=model.gamma))
    try:
        yield
    finally:
        backbone.operators = before


def attend_by_node(asked: Attending, gamma: int) -> Tensor:
    """``attend`` for streams: the runs are main rows and γ rows per node."""
    (past_keys, own_keys), (past_values, own_values) = asked.keys, asked.values
    batch, heads, rows, dim = asked.query.shape
    kv_heads, past = past_keys.shape[1], past_keys.shape[2]
    groups, nodes = heads // kv_heads, rows // gamma

    def by_node(x: Tensor) -> Tensor:
        """``[B, h * kv_heads, n * γ, e] -> [B, kv_heads, n, h * γ, e]``."""
        x = x.reshape(batch, kv_heads, -1, nodes, gamma, x.shape[-1]).transpose(2, 3)
        return x.reshape(batch, kv_heads, nodes, -1, x.shape[-1])

    def by_row(x: Tensor) -> Tensor:
        """``[B, kv_heads, n, groups * γ, e] -> [B, kv_heads, groups * n * γ, e]``."""
        x = x.reshape(batch, kv_heads, nodes, groups, gamma, x.shape[-1]).transpose(2, 3)
        return x.reshape(batch, kv_heads, groups * rows, x.shape[-1])

    q = asked.query * asked.scale
    seen = torch.matmul(q.reshape(batch, kv_heads, groups * rows, dim), past_keys.transpose(2, 3))
    own = by_row(torch.matmul(by_node(q), by_node(own_keys).transpose(3, 4)))
    scores = torch.cat([seen, own], dim=-1).reshape(batch, kv_heads, groups, rows, past + gamma)
    if asked.softcap is not None:
        scores = torch.tanh(scores / asked.softcap) * asked.softcap
    block = asked.mask[:, :, :gamma, past : past + gamma].repeat(1, 1, nodes, 1)  # the same for every node
    mask = torch.cat([asked.mask[..., :past], block], dim=-1)
    weights = torch.softmax(scores + mask[:, :, None], dim=-1).to(q.dtype)
    weights = weights.reshape(batch, kv_heads, groups * rows, past + gamma)
    out = torch.matmul(weights[..., :past], past_values)
    mine = weights[..., past:].reshape(batch, kv_heads * groups, rows, gamma)
    out = out + by_row(torch.matmul(by_node(mine), by_node(own_values)))
    return out.reshape(asked.query.shape).transpose(1, 2)
