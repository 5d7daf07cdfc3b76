"""Attention of an ExecuTorch program, in which a new row stands in the column of its position.

A softmax adds its terms in the lanes of a vector unit, so its sum depends, in the last bit, on the columns in which the
terms stand. Beside the cache a drafted row would stand elsewhere than after its commit, and an 8-bit rounding may make
a level of that bit. So new rows are put where they will be committed: a node of the tree then adds what plain decoding
adds in its place, in the same order, and the logits of both agree in every bit. Products add their terms one after the
other, and terms that are zero change nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ssdevice.model.attention import MASKED, Attending
from ssdevice.model.operators import Operators, under
from ssdevice.model.step import StreamModel


@dataclass(frozen=True)
class ColumnAttention:
    """An ``Attention`` for a batch of one, as products of three dimensions: the delegate's own form.

    The run without a batch dimension is the cache as ``VisibleForm.past`` has it; its keys are an operand as they
    are. ``placed``: new rows stand in columns of their own; at each position up to its own a row sees one of them at
    most.
    """

    placed: bool

    def __call__(self, asked: Attending) -> Tensor:
        """See ``ssdevice.model.attention.Attention``."""
        keys, values, softcap = asked.keys, asked.values, asked.softcap
        _one, heads, rows, dim = asked.query.shape
        kv_heads = keys[-1].shape[1]
        groups = heads // kv_heads
        q = (asked.query * asked.scale).reshape(kv_heads, groups * rows, dim)
        turned = [k if k.dim() == 3 else k.reshape(kv_heads, k.shape[2], dim).transpose(1, 2) for k in keys]
        scores = [torch.bmm(q, k) for k in turned]
        # Values are joined, not weights cut apart: the cache's rows are counted only when a call runs.
        joined = torch.cat([v if v.dim() == 3 else v.reshape(kv_heads, v.shape[2], v.shape[3]) for v in values], dim=1)

        def weigh(scores: Tensor, mask: Tensor) -> Tensor:
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            return torch.softmax(scores + torch.cat([mask] * groups, dim=1), dim=-1)

        mask = asked.mask.reshape(1, rows, asked.mask.shape[3])
        if not self.placed or len(keys) != 2:
            weights = weigh(torch.cat(scores, dim=-1), mask)
        else:
            past, new = scores
            shown = past.shape[2]
            at = asked.positions.reshape(-1)
            column = torch.arange(shown, dtype=torch.int32)
            # 1 where a row will stand; 1 where it stands already; 1 where one new row sees another.
            place = torch.eq(at[:, None], column[None]).to(torch.float32)[None].expand(kv_heads, -1, -1)
            back = torch.eq(column[:, None], at[None]).to(torch.float32)[None].expand(kv_heads, -1, -1)
            kept = torch.lt(column, at[:1]).to(torch.float32)[None, None]
            seen = torch.cat([torch.gt(mask[:, :, shown:], MASKED / 2).to(torch.float32)] * groups, dim=1)
            fresh = torch.ge(column, at[:1])[None] & torch.le(column[None], at[:, None])
            hidden = torch.where(fresh, 0.0, mask[0, :, :shown])[None]
            whole = weigh(past * kept + torch.bmm(new * seen, place), hidden)
            weights = torch.cat([whole * kept, torch.bmm(whole, back) * seen], dim=-1)
        return torch.bmm(weights, joined).reshape(1, heads, rows, -1).transpose(1, 2)


def attending(model: StreamModel, span: int = 0) -> StreamModel:
    """The model with its layers attending through a ``ColumnAttention``.

    ``span``: how many positions new rows take. Where a layer's window is shorter, and without it, no row has a column.
    """
    placed = span > 0 and all(window is None or window >= span for window in model.backbone.windows())
    return under(model, Operators(attention=ColumnAttention(placed)))
