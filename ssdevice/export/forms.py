"""The step and prefill modules behind the flat signatures of the contract.

In ``ExternalCacheForm`` the caller holds the KV cache: committed rows come in as ``[P, kv_heads *
head_dim]`` per layer and the new rows of all layers leave as one tensor. What an exporter should
see as a whole (attention over several runs of rows, rotary embedding, norms, the view of rows as
heads, the best candidates) runs through the operators below and torch's own, which compute the same
as the model's code.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ssdevice.config import Schedule
from ssdevice.contract import DRAFT, ONE_ROW, PLAIN, PREFILL, STEP, STEP_SHORT, VERIFY, Geometry
from ssdevice.model import attention, operators
from ssdevice.model.attention import Attending, KeyValue
from ssdevice.model.operators import Operators, norm_kind, rotate, under
from ssdevice.model.step import (
    DraftModule,
    Prefill,
    PrefillModule,
    StepModule,
    StreamModel,
    Verified,
    VerifyModule,
)
from ssdevice.tree import Tree

FunctionModule = StepModule | PrefillModule | VerifyModule | DraftModule
"""What computes one of the contract's functions."""


@torch.library.custom_op("ssdevice::heads", mutates_args=())
def heads(rows: Tensor, kv_heads: int) -> Tensor:
    """Cache rows ``[P, kv_heads * hd]`` as ``[1, kv_heads, P, hd]``."""
    return rows.reshape(1, rows.shape[0], kv_heads, -1).transpose(1, 2).contiguous()


@heads.register_fake
def _(rows: Tensor, kv_heads: int) -> Tensor:
    return rows.new_empty(1, kv_heads, rows.shape[0], rows.shape[1] // kv_heads)


@torch.library.custom_op("ssdevice::attend", mutates_args=())
def attend(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    """``ssdevice.model.attention.attend`` as one operator: ``[1, heads, Q, hd] -> [1, Q, heads,
    hd]``.
    """
    positions = torch.zeros(0)  # not used by this attention
    return attention.attend(
        Attending(query, keys, values, mask, positions, scale, softcap or None)
    ).contiguous()


@attend.register_fake
def _(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


@torch.library.custom_op("ssdevice::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of ``x [1, heads, R, hd]`` by the full tables ``cos, sin [1, R, hd]``."""
    return rotate(x, cos, sin, interleaved)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("ssdevice::top_k", mutates_args=())
def top_k(scores: Tensor, k: int) -> Tensor:
    """``ssdevice.model.operators.top_k`` as one operator."""
    return operators.top_k(scores, k)


@top_k.register_fake
def _(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty(scores.shape[0], k, dtype=torch.int32)


def _attention(asked: Attending) -> Tensor:
    scale = float(asked.scale)
    softcap = float(asked.softcap or 0.0)
    out: Tensor = attend(
        asked.query, list(asked.keys), list(asked.values), asked.mask, scale, softcap
    )
    return out


def _norm(module: nn.Module) -> nn.Module | None:
    """torch's own RMS norm for one of a family."""
    kind = norm_kind(module)
    if kind is None or kind.centered:
        return None
    made = nn.RMSNorm(kind.scale.shape, kind.eps)
    made.weight = kind.scale
    return made


def exportable(model: StreamModel) -> StreamModel:
    """The model with its layers running through the operators above where they compute the same."""
    return under(model, Operators(attention=_attention, rotary=rotary, norm=_norm, top_k=top_k))


class ExternalCacheForm(nn.Module):
    """One function of the contract with the cache as rows: its inputs, then keys and values ``[P,
    W]`` by layer.
    """

    def __init__(self, name: str, module: FunctionModule, kv_heads: int) -> None:
        super().__init__()
        self.name = name
        self.module = module
        self.kv_heads = kv_heads

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From the function's inputs to its outputs, both in the contract's order."""
        integers = len(tensors) - 2 * len(self.module.model.backbone.layers)
        rows = [heads(past, self.kv_heads) for past in tensors[integers:]]
        past = list(zip(rows[::2], rows[1::2], strict=True))
        outputs, new = call(self.name, self.module, tensors[:integers], past)
        return (*outputs, stack(new).to(tensors[-1].dtype)) if new else outputs


def call(
    name: str,
    module: FunctionModule,
    given: Sequence[Tensor],
    past: Sequence[KeyValue],
    logits: bool = False,
) -> tuple[tuple[Tensor, ...], list[KeyValue]]:
    """A function's outputs in the contract's order, all but the rows, and its new rows by layer.

    ``given``: its inputs in the contract's order. ``logits``: those of a step follow its outputs.
    """
    if name in ONE_ROW:
        last, length = given
        given = last, torch.zeros(0, 1, dtype=torch.int32), length
    made = module(*given, past)
    if isinstance(made, Tensor):
        return (made,), []
    if isinstance(made, Prefill):
        return (made.token, made.drafts), made.rows
    if isinstance(made, Verified):
        return (made.logits, made.states), made.rows
    outputs = (made.tokens,) if name == PLAIN else (made.tokens, made.count, made.drafts)
    if logits:
        outputs = (*outputs, made.logits)
    return outputs, made.rows


def stack(rows: Sequence[KeyValue]) -> Tensor:
    """New rows of all layers as ``[2 * layers, n, kv_heads * hd]``: keys and values of layer 0, of
    layer 1, ..
    """
    return torch.cat([part.transpose(1, 2).flatten(2) for pair in rows for part in pair])


def function_module(
    name: str, model: StreamModel, geometry: Geometry, schedule: Schedule
) -> FunctionModule:
    """The module that computes one of the contract's functions.

    Only ``step`` depends on the schedule.
    """
    g = geometry
    if name in (STEP, STEP_SHORT):
        return StepModule(model, g.tree if name == STEP else g.shorter.tree, g.k, schedule)
    if name == PREFILL:
        return PrefillModule(model, g.chunk, g.k)
    if name == PLAIN:
        return StepModule(model.plain(), Tree.root_only(), 1, Schedule.DEFERRED)
    if name == DRAFT:
        return DraftModule(model, g.k)
    if name == VERIFY:
        return VerifyModule(model, g.tree, g.k)
    return VerifyModule(model, Tree.root_only(), 1)
