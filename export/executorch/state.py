"""The cache as an ExecuTorch program stores it, and the part of it that a call reads.

Keys and values stand as ``[kv_heads, capacity, head_dim]``: the portable kernel that shows rows copies a row at a time
there, and element by element where rows are the last dimension. A call reads the first rows, as many as are committed
and as new rows of a step will take, rounded up to ``BUCKET``: attention then costs what the conversation holds, not
what it may hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ssdevice.config import Schedule
from ssdevice.contract import KEYS, VALUES, Geometry
from ssdevice.export.executorch.slots import touch
from ssdevice.export.state_form import LayerStates, StateForm
from ssdevice.model.attention import KeyValue
from ssdevice.model.backbone import Backbone
from ssdevice.model.step import PrefillModule, StepModule

BUCKET = 64
"""Rows that are read are a multiple of this.

XNNPACK's softmax takes so many columns at once and adds a remainder in another order; a delegate that meets a new size
lays its memory out anew.
"""


class LogitsForm(StateForm):
    """A function of the contract over layer states.

    ``step`` and ``step_plain`` also give what they chose their tokens from, ``logits [T, V]``, as a last output: a
    delegate gives it anyway. Hosts may leave it; whoever compares ways to decode needs it.
    """

    def __init__(self, name: str, module: StepModule | PrefillModule, geometry: Geometry) -> None:
        super().__init__(name, module, geometry, stacked=False)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See StateForm."""
        with kept_logits(self.module.model.backbone) as logits:
            result = super().forward(*tensors)
        return result if isinstance(self.module, PrefillModule) else (*result, logits[0][0])


class VisibleForm(LogitsForm):
    """A LogitsForm that reads the committed rows alone."""

    keys: LayerStates
    values: LayerStates

    def __init__(self, name: str, module: StepModule | PrefillModule, geometry: Geometry) -> None:
        super().__init__(name, module, geometry)
        self._visible: Any = geometry.capacity
        self.span = span_of(module)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See StateForm; ``length`` is the last input of every function."""
        length, capacity = tensors[-1], self.geometry.capacity
        least = min(BUCKET, capacity)
        rounded = torch.div(length + (self.span + BUCKET - 1), BUCKET, rounding_mode="floor") * BUCKET
        visible: Any = rounded.clamp(least, capacity).item()
        torch._check(visible >= least)  # type: ignore[no-untyped-call]
        torch._check(visible <= capacity)  # type: ignore[no-untyped-call]
        self._visible = visible
        result = super().forward(*tensors)
        touch(self.module.model)
        return result

    def past(self) -> list[KeyValue]:
        """Per layer keys ``[kv_heads, head_dim, rows]`` and values ``[kv_heads, rows, head_dim]``.

        Without a batch dimension, by which ``executorch_attention`` tells them from new rows. As for those, dimension 2
        of the keys is the number of rows.
        """
        rows = self._visible
        return [(self.keys[i][:, :rows].transpose(1, 2), self.values[i][:, :rows]) for i in range(self.geometry.layers)]


def span_of(module: StepModule | PrefillModule) -> int:
    """Positions that new rows of a call take, from the length on, and that need a column among the rows shown."""
    if isinstance(module, PrefillModule):
        return 0
    fused = module.model.streams is not None and module.schedule is Schedule.FUSED
    return module.tree.emitted + (module.model.gamma if fused else 0)


@contextmanager
def kept_logits(backbone: Backbone) -> Iterator[list[Tensor]]:
    """What the LM head gives within this context, call by call: the main rows' logits ``[1, R, V]`` first."""
    kept: list[Tensor] = []
    head = backbone.head

    def keep(h: Tensor) -> Tensor:
        kept.append(head(h))
        return kept[-1]

    backbone.head = keep  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        del backbone.head


def state_names(geometry: Geometry) -> list[str]:
    """Names of the state tensors: keys by layer, then values by layer."""
    return [f"{state}.{layer}" for state in (KEYS, VALUES) for layer in range(geometry.layers)]
