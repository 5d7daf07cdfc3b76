"""The contract's functions with the cache as state of the graph, in a form that survives half precision.

The state is written by the graph (see ``coreml_ops``); the integers go in and out. Root-mean-square norms are computed
on rows scaled by their largest value: the square of an activation above 256 does not fit into float16, and such
activations are common in trained models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ssdevice.config import Schedule
from ssdevice.contract import KEYS, PLAIN, PREFILL, VALUES, Geometry
from ssdevice.export.coreml_options import KVWrite
from ssdevice.export.coreml_ops import masked_write, write_rows
from ssdevice.export.forms import function_module
from ssdevice.model.attention import KeyValue
from ssdevice.model.step import PrefillModule, StepModule, StreamModel

MASK_VALUE = -1e4
"""Additive mask of an invisible row: float16 holds it, and a fully masked row stays finite."""
SMALLEST_SCALE = 2.0**-6
"""Rows below it are scaled by it: eps divided by its square still fits float16."""


class _StateForm(nn.Module):
    """One function of the contract; ``keys`` and ``values`` are its state, ``[layers, kv_heads, capacity, hd]``."""

    keys: Tensor
    values: Tensor

    def __init__(self, module: StepModule | PrefillModule, geometry: Geometry, write: KVWrite) -> None:
        super().__init__()
        self.module = module
        self.write = write_rows if write is KVWrite.SLICE else masked_write
        shape = (geometry.layers, geometry.kv_heads, geometry.capacity, geometry.head_dim)
        for name in (KEYS, VALUES):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float16))

    def _past(self) -> list[KeyValue]:
        keys, values = self.keys.float(), self.values.float()
        return [(keys[i : i + 1], values[i : i + 1]) for i in range(keys.shape[0])]

    def _commit(self, rows: Sequence[KeyValue], length: Tensor) -> None:
        for state, new in (
            (self.keys, torch.cat([keys for keys, _ in rows])),
            (self.values, torch.cat([values for _, values in rows])),
        ):
            state.copy_(self.write(state, new.to(state.dtype), length))


class StepForm(_StateForm):
    """``step``."""

    def forward(self, root: Tensor, drafts: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``tokens [A]``, ``count [1]``, ``next_drafts [γ, k]``."""
        out = self.module(root, drafts, length, self._past())
        self._commit(out.rows, length)
        return out.tokens, out.count, out.drafts


class PlainForm(_StateForm):
    """``step_plain``."""

    def forward(self, root: Tensor, length: Tensor) -> tuple[Tensor]:
        """``tokens [1]``."""
        out = self.module(root, torch.zeros(0, 1, dtype=torch.int32), length, self._past())
        self._commit(out.rows, length)
        return (out.tokens,)


class PrefillForm(_StateForm):
    """``prefill``."""

    def forward(self, chunk: Tensor, valid: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """``next_root [1]``, ``next_drafts [γ, k]``."""
        out = self.module(chunk, valid, length, self._past())
        self._commit(out.rows, length)
        return out.root, out.drafts


class PlainPrefillForm(_StateForm):
    """``prefill`` of a model without streams."""

    def forward(self, chunk: Tensor, valid: Tensor, length: Tensor) -> tuple[Tensor]:
        """``next_root [1]``."""
        out = self.module(chunk, valid, length, self._past())
        self._commit(out.rows, length)
        return (out.root,)


def state_form(name: str, model: StreamModel, geometry: Geometry, schedule: Schedule, write: KVWrite) -> nn.Module:
    """The module of one of the contract's functions; its inputs and outputs stand in the contract's order."""
    module = function_module(name, model, geometry, schedule)
    if name == PLAIN:
        return PlainForm(module, geometry, write)
    if name == PREFILL:
        return (PrefillForm if model.gamma else PlainPrefillForm)(module, geometry, write)
    return StepForm(module, geometry, write)


class HalfRMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * scale`` without leaving float16: the row is divided by its largest value first."""

    def __init__(self, scale: Tensor, eps: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale.detach().clone(), requires_grad=False)
        self.root_eps = eps**0.5

    def forward(self, x: Tensor) -> Tensor:
        """``[.., D] -> [.., D]``, row by row."""
        largest = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_SCALE)
        row = x / largest
        # eps is divided by the square of the scale in two steps: the square itself may not fit.
        eps = self.root_eps / largest
        return row * torch.rsqrt((row * row).mean(-1, keepdim=True) + eps * eps) * self.scale


@contextmanager
def half_precision(model: StreamModel) -> Iterator[None]:
    """Within this context the model computes the same with intermediate values that float16 holds."""
    backbone = model.backbone
    before = backbone.mask_value
    backbone.mask_value = MASK_VALUE
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(backbone.modules()):
        for name, child in list(parent.named_children()):
            norm = half_norm(child)
            if norm is not None:
                swapped.append((parent, name, child))
                setattr(parent, name, norm)
    try:
        yield
    finally:
        backbone.mask_value = before
        for parent, name, child in swapped:
            setattr(parent, name, child)


def half_norm(module: Any) -> HalfRMSNorm | None:
    """The HalfRMSNorm that computes what a norm module does, or None if it is no root-mean-square norm.

    Found by computing: families differ in the name of eps and in whether the weight is added to one.
    """
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor):
        return None
    eps = next((float(getattr(module, name)) for name in ("variance_epsilon", "eps") if hasattr(module, name)), 0.0)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(5, weight.shape[-1], generator=generator) * torch.tensor([1e-4, 1e-2, 1.0, 30.0, 500.0])[:, None]
    with torch.no_grad():
        expected = module(probe)
        for scale in (weight, 1.0 + weight):
            candidate = HalfRMSNorm(scale, eps)
            if torch.allclose(candidate(probe), expected, rtol=1e-5, atol=1e-6):
                return candidate
    return None
