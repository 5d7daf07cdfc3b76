"""The cache of an ExecuTorch program, and the part of it that a call reads.

Keys and values are ``[kv_heads, capacity, head_dim]``. In this layout the portable kernel that slices rows copies row
by row; with rows in the last dimension it would copy element by element. A call reads the committed rows and the
positions of a step's new rows, rounded up to ``BUCKET``. So attention costs what the conversation holds, not what it
may hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssdevice.config import Schedule
from ssdevice.contract import Geometry
from ssdevice.export.executorch.attention import attending
from ssdevice.export.executorch.slots import touch
from ssdevice.export.forms import FunctionModule, function_module
from ssdevice.export.state_form import InternalCacheForm, LayerStates
from ssdevice.model.attention import KeyValue
from ssdevice.model.step import StepModule, StreamModel, TreeModule

BUCKET = 64
"""The number of rows read is a multiple of this.

XNNPACK's softmax takes so many columns at once and adds a remainder in another order, and a delegate plans its memory
again for each new size.
"""


class VisibleForm(InternalCacheForm):
    """An InternalCacheForm that reads only the committed rows of layer states, through ``ColumnAttention``."""

    keys: LayerStates
    values: LayerStates

    def __init__(
        self, name: str, model: StreamModel, geometry: Geometry, schedule: Schedule, *, logits: bool = False
    ) -> None:
        module = function_module(name, model, geometry, schedule)
        span = span_of(module)
        module.model = attending(module.model, span)
        super().__init__(name, module, geometry, stacked=False, logits=logits)
        self._visible: Any = geometry.capacity
        self.span = span

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See InternalCacheForm; ``length`` is the last input of every function."""
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

        They have no batch dimension, by which ``ColumnAttention`` tells them from new rows. As in new rows, dimension
        2 of the keys is the number of rows.
        """
        rows = self._visible
        return [(self.keys[i][:, :rows].transpose(1, 2), self.values[i][:, :rows]) for i in range(self.geometry.layers)]


def span_of(module: FunctionModule) -> int:
    """Number of positions from ``length`` on that a call's new rows take, each of which needs a visible column."""
    if not isinstance(module, TreeModule):
        return 0
    fused = isinstance(module, StepModule) and module.model.streams is not None and module.schedule is Schedule.FUSED
    return module.tree.emitted + (module.model.gamma if fused else 0)
