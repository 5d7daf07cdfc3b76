"""The torch reference under the quantization of an ONNX export: the same weights, the same rounding of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ssdevice.adapters.storage import LEVELS
from ssdevice.export.onnx.functions import BLOCK
from ssdevice.export.onnx.linears import SMALL
from ssdevice.export.onnx.quantization import Int4Weight, Int8Weight
from ssdevice.export.plan import Quant
from ssdevice.model.attention import Attending, Attention
from ssdevice.model.lora import LoraLinear
from ssdevice.model.mapped import release
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import StreamRowAdapter, low_rank_factors


@contextmanager
def simulated(
    model: StreamModel, quant: Quant, slotted: bool = False, keep: bool = True, cache_dtype: str = "float32"
) -> Iterator[None]:
    """Within this context linears and the embedding compute what their exported forms compute, up to float rounding.

    ``slotted``: low-rank terms beside linears are in slots. Without ``keep`` the model gives up its own weights, which
    saves their memory: afterwards the model still has those of the exported forms. ``cache_dtype``: attention rounds
    keys and values to it.
    """
    if quant is Quant.FP32:
        yield
        return
    backbone, operators = model.backbone, model.backbone.operators
    eight_bits = (backbone.embed_tokens, backbone.lm_head, model.draft_head)
    with ExitStack() as undo:
        if cache_dtype != "float32":
            rounding = partial(_attend_rounded, operators.attention, getattr(torch, cache_dtype))
            undo.callback(setattr, backbone, "operators", operators)
            backbone.operators = replace(operators, attention=rounding)
        done: set[int] = set()
        own = model.streams.own_terms() if model.streams is not None else []
        downs, floats = _slots(model) if slotted else (set(), {part for term in own for part in term.children()})
        for part in model.modules():
            if not isinstance(part, (nn.Linear, nn.Embedding)) or part in floats:
                continue
            if part.weight.numel() < SMALL and part not in downs:
                continue
            whole = quant is Quant.INT8 or part in eight_bits or part in downs
            if isinstance(part, nn.Linear):
                undo.enter_context(part.register_forward_pre_hook(partial(_rounded, None if whole else BLOCK)))
            weight = part.weight
            if id(weight) in done:
                continue
            done.add(id(weight))
            form = (Int8Weight if whole else Int4Weight).of(weight.detach().float().numpy().T)
            if keep:
                undo.callback(setattr, weight, "data", weight.data)
                weight.data = torch.from_numpy(np.ascontiguousarray(form.dequantized().T)).to(weight.dtype)
            else:
                weight.data.copy_(torch.from_numpy(form.dequantized().T))
                release()
        yield


def _attend_rounded(attend: Attention, dtype: torch.dtype, asked: Attending) -> Tensor:
    """Attention over rows as a cache holds them, the new ones included."""
    keys, values = ([run.to(dtype).to(run.dtype) for run in runs] for runs in (asked.keys, asked.values))
    return attend(replace(asked, keys=keys, values=values))


def _slots(model: StreamModel) -> tuple[set[nn.Module], set[nn.Module]]:
    """Factors that a slot holds in eight bits, and those that it holds in float32."""
    quantized = {
        part.adapter
        for part in model.modules()
        if isinstance(part, (LoraLinear, StreamRowAdapter))
        and isinstance(part.base, nn.Linear)
        and part.base.weight.numel() >= SMALL
    }
    downs: set[nn.Module] = {term.down for term in quantized}
    return downs, low_rank_factors(model) - downs


def _rounded(block: int | None, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    """Each block of values of a row (None: the row) to 255 levels of its largest magnitude, as the kernels do."""
    x = inputs[0]
    width = x.shape[-1]
    blocks = nn.functional.pad(x, (0, -width % (block or width))).reshape(*x.shape[:-1], -1, block or width)
    peak = blocks.abs().amax(dim=-1, keepdim=True)
    scale = peak / LEVELS if block else peak * (1 / LEVELS)
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    levels = torch.clamp(torch.round(blocks / safe), -LEVELS - 1, LEVELS)
    return ((levels * scale).reshape(*x.shape[:-1], -1)[..., :width],)
