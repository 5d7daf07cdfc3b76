"""The step and prefill modules behind the flat signatures of the contract.

``RowsForm`` is the ROWS form: committed rows come in as ``[P, kv_heads * head_dim]`` per layer and the new rows of all
layers leave as one tensor. What an exporter should recognise as a whole (attention over several runs of rows, rotary
embedding, the view of rows as heads) runs through the operators below; each computes the same as the model's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ssdevice.config import Schedule
from ssdevice.contract import PLAIN, PREFILL, STEP, Geometry
from ssdevice.model import attention
from ssdevice.model.attention import KeyValue
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.tree import Tree

ATTENTION = "ssdevice_rows"
ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""What every Hugging Face family calls its rotary embedding."""


@torch.library.custom_op("ssdevice::heads", mutates_args=())
def heads(rows: Tensor, kv_heads: int) -> Tensor:
    """Cache rows ``[P, kv_heads * hd]`` as ``[1, kv_heads, P, hd]``."""
    return rows.reshape(1, rows.shape[0], kv_heads, -1).transpose(1, 2).contiguous()


@heads.register_fake
def _(rows: Tensor, kv_heads: int) -> Tensor:
    return rows.new_empty(1, kv_heads, rows.shape[0], rows.shape[1] // kv_heads)


@torch.library.custom_op("ssdevice::attend", mutates_args=())
def attend(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """``ssdevice.model.attention.attend`` as one operator: ``[1, heads, Q, hd] -> [1, Q, heads, hd]``."""
    out, _ = attention.attend(
        cast(nn.Module, None), query, keys, values, mask, scaling=scale, softcap=softcap if softcap else None
    )
    return out.contiguous()


@attend.register_fake
def _(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor, scale: float, softcap: float
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


@torch.library.custom_op("ssdevice::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of ``x [1, heads, R, hd]`` by the full tables ``cos, sin [1, R, hd]``."""
    return rotate(x, cos, sin, interleaved)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """What ``rotary`` computes: each pair of elements turned by its angle."""
    half = x.shape[-1] // 2
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    else:
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


def _attention(
    module: nn.Module,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, list(keys), list(values), attention_mask, float(scale), float(softcap or 0.0)), None


AttentionInterface.register(ATTENTION, _attention)


@contextmanager
def exportable(model: StreamModel) -> Iterator[None]:
    """Within this context the model's layers run through the operators above wherever they compute the same."""
    config = model.backbone.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    patched: list[tuple[Any, Any]] = []
    tables = [value for name, value in model.backbone.named_buffers() if name.startswith("rope_")]
    for name in {type(part).__module__ for part in model.backbone.layers.modules()}:
        module = sys.modules[name]
        original = getattr(module, ROTARY_FUNCTION, None)
        kind = None if original is None else rotary_kind(original, config)
        if original is not None and kind is not None and all(_paired(table, kind) for table in tables):
            patched.append((module, original))
            setattr(module, ROTARY_FUNCTION, _through_operator(original, kind))
    try:
        yield
    finally:
        config._attn_implementation = before
        for module, original in patched:
            setattr(module, ROTARY_FUNCTION, original)


def rotary_kind(apply: Callable[..., tuple[Tensor, Tensor]], config: Any) -> bool | None:
    """Whether a family's rotary function is the interleaved one (True), the halves one (False) or another (None).

    Found by computing: families give one name to several formulas.
    """
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if dim % 2:
        return None
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 3, dim, generator=generator), torch.randn(1, 2, 3, dim, generator=generator)
    angles = torch.randn(1, 3, dim // 2, generator=generator)
    for interleaved in (False, True):
        whole = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat([angles, angles], dim=-1)
        cos, sin = whole.cos(), whole.sin()
        try:
            got = apply(q, k, cos, sin)
        except (TypeError, RuntimeError, IndexError):
            return None
        expected = rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
        if all(a.shape == b.shape and torch.allclose(a, b, atol=1e-6) for a, b in zip(got, expected, strict=True)):
            return interleaved
    return None


def _paired(table: Tensor, interleaved: bool) -> bool:
    """Whether a table holds each angle twice, where the formula expects it; half of it is then enough."""
    if table.shape[-1] % 2:
        return False
    first, second = (table[:, 0::2], table[:, 1::2]) if interleaved else table.chunk(2, dim=-1)
    return torch.equal(first, second)


def _through_operator(
    original: Callable[..., tuple[Tensor, Tensor]], interleaved: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        if cos.shape[-1] != q.shape[-1]:  # some families cut the turning part out in here
            return original(q, k, cos, sin)
        return rotary(q, cos, sin, interleaved), rotary(k, cos, sin, interleaved)

    return apply


class RowsForm(nn.Module):
    """One function of the contract with the cache as rows: its inputs, then keys and values ``[P, W]`` by layer."""

    def __init__(self, name: str, module: StepModule | PrefillModule, kv_heads: int) -> None:
        super().__init__()
        self.name, self.module, self.kv_heads = name, module, kv_heads

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The function's inputs in the contract's order, then its outputs in the contract's order."""
        module = self.module
        integers = len(tensors) - 2 * module.model.backbone.num_layers
        rows = [heads(past, self.kv_heads) for past in tensors[integers:]]
        past = list(zip(rows[::2], rows[1::2], strict=True))
        if isinstance(module, PrefillModule):
            tokens, valid, length = tensors[:integers]
            prefill = module(tokens, valid, length, past)
            drafts = (prefill.drafts,) if self.name == PREFILL else ()
            return (prefill.root, *drafts, stack(prefill.rows))
        if self.name == PLAIN:
            root, length = tensors[:integers]
            none = torch.zeros(0, 1, dtype=torch.int32)
            step = module(root, none, length, past)
            return step.tokens, stack(step.rows)
        root, drafts_in, length = tensors[:integers]
        step = module(root, drafts_in, length, past)
        return step.tokens, step.count, step.drafts, stack(step.rows)


def stack(rows: Sequence[KeyValue]) -> Tensor:
    """New rows of all layers as ``[2 * layers, n, kv_heads * hd]``: keys and values of layer 0, of layer 1, .."""
    flat = [part[0].transpose(0, 1).flatten(1)[None] for pair in rows for part in pair]
    return torch.cat(flat, dim=0)


def function_module(
    name: str, model: StreamModel, geometry: Geometry, schedule: Schedule
) -> StepModule | PrefillModule:
    """The module that computes one of the contract's functions."""
    if name == STEP:
        return StepModule(model, geometry.tree, geometry.k, schedule)
    if name == PREFILL:
        return PrefillModule(model, geometry.chunk, geometry.k)
    return StepModule(StreamModel(model.backbone, None, 0), Tree.root_only(), 1, Schedule.DEFERRED)
