"""The cache of an ExecuTorch program, the part of it that a call reads, and attention over it.

Keys and values are ``[kv_heads, capacity, head_dim]``. In this layout the portable kernel that
slices rows copies row by row; with rows in the last dimension it would copy element by element. A
call reads the committed rows and the positions of a step's new rows, rounded up to ``BUCKET``, so
attention costs what the conversation holds, not what it may hold.

Attention puts a new row into the column of its position. A softmax adds its terms in the lanes of a
vector unit, so the last bit of its sum depends on the columns of the terms, and an 8-bit rounding
may turn that bit into a level. A node of the tree in the column where it will be committed adds the
same terms as plain decoding in the same order, so the logits of both agree in every bit. Products
add their terms one after the other, and terms that are zero change nothing there.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssdevice.config import Schedule
from ssdevice.contract import Geometry
from ssdevice.export.executorch.slots import touch
from ssdevice.export.forms import FunctionModule, function_module
from ssdevice.export.state_form import InternalCacheForm, LayerStates
from ssdevice.model.attention import MASKED, Attending, KeyValue
from ssdevice.model.operators import Operators, under
from ssdevice.model.step import StepModule, StreamModel, TreeModule


def column_attention(asked: Attending, placed: bool) -> Tensor:
    """An ``Attention`` for a batch of one, as products of three dimensions, which is the delegate's
    form.

    The run without a batch dimension is the cache from ``VisibleForm.past``; its keys are used as
    they are. ``placed``: new rows are put into the columns of their positions; a row sees at most
    one of them at each position.
    """
    keys = asked.keys
    values = asked.values
    softcap = asked.softcap
    _one, heads, rows, dim = asked.query.shape
    kv_heads = keys[-1].shape[1]
    groups = heads // kv_heads
    q = (asked.query * asked.scale).reshape(kv_heads, groups * rows, dim)
    turned = [
        k if k.dim() == 3 else k.reshape(kv_heads, k.shape[2], dim).transpose(1, 2) for k in keys
    ]
    scores = [torch.bmm(q, k) for k in turned]
    # Values are joined instead of splitting weights, because the number of cache rows is only known
    # at run time.
    joined = torch.cat(
        [v if v.dim() == 3 else v.reshape(kv_heads, v.shape[2], v.shape[3]) for v in values], dim=1
    )

    def weigh(scores: Tensor, mask: Tensor) -> Tensor:
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        return torch.softmax(scores + torch.cat([mask] * groups, dim=1), dim=-1)

    mask = asked.mask.reshape(1, rows, asked.mask.shape[3])
    if not placed or len(keys) != 2:
        weights = weigh(torch.cat(scores, dim=-1), mask)
    else:
        past, new = scores
        shown = past.shape[2]
        at = asked.positions.reshape(-1)
        column = torch.arange(shown, dtype=torch.int32)
        # place, back: 1 at the column of a new row; kept: 1 for committed columns; seen: 1 for
        # visible new rows.
        place = torch.eq(at[:, None], column[None]).to(torch.float32)[None].expand(kv_heads, -1, -1)
        back = torch.eq(column[:, None], at[None]).to(torch.float32)[None].expand(kv_heads, -1, -1)
        kept = torch.lt(column, at[:1]).to(torch.float32)[None, None]
        seen = torch.cat(
            [torch.gt(mask[:, :, shown:], MASKED / 2).to(torch.float32)] * groups, dim=1
        )
        fresh = torch.ge(column, at[:1])[None] & torch.le(column[None], at[:, None])
        hidden = torch.where(fresh, 0.0, mask[0, :, :shown])[None]
        whole = weigh(past * kept + torch.bmm(new * seen, place), hidden)
        weights = torch.cat([whole * kept, torch.bmm(whole, back) * seen], dim=-1)
    return torch.bmm(weights, joined).reshape(1, heads, rows, -1).transpose(1, 2)


BUCKET = 64
"""The number of rows read is a multiple of this.

XNNPACK's softmax takes so many columns at once and adds a remainder in another order, and a
delegate plans its memory again for each new size.
"""


class VisibleForm(InternalCacheForm):
    """An InternalCacheForm that reads only the committed rows of layer states, through
    ``column_attention``.
    """

    keys: LayerStates
    values: LayerStates

    def __init__(
        self,
        name: str,
        model: StreamModel,
        geometry: Geometry,
        schedule: Schedule,
        *,
        logits: bool = False,
    ) -> None:
        module = function_module(name, model, geometry, schedule)
        span = span_of(module)
        placed = span > 0 and all(
            window is None or window >= span for window in model.backbone.windows()
        )
        module.model = under(
            module.model, Operators(attention=partial(column_attention, placed=placed))
        )
        super().__init__(name, module, geometry, stacked=False, logits=logits)
        self._visible: Any = geometry.capacity
        self.span = span

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        length = tensors[-1]
        capacity = self.geometry.capacity
        least = min(BUCKET, capacity)
        rounded = (
            torch.div(length + (self.span + BUCKET - 1), BUCKET, rounding_mode="floor") * BUCKET
        )
        visible: Any = rounded.clamp(least, capacity).item()
        torch._check(visible >= least)  # type: ignore[no-untyped-call]
        torch._check(visible <= capacity)  # type: ignore[no-untyped-call]
        self._visible = visible
        result = super().forward(*tensors)
        touch(self.module.model)
        return result

    def past(self) -> list[KeyValue]:
        """Per layer keys ``[kv_heads, head_dim, rows]`` and values ``[kv_heads, rows, head_dim]``.

        ``column_attention`` tells them from new rows by the missing batch dimension. As in new
        rows, dimension 2 of the keys is the number of rows.
        """
        rows = self._visible
        return [
            (self.keys[i][:, :rows].transpose(1, 2), self.values[i][:, :rows])
            for i in range(self.geometry.layers)
        ]


def span_of(module: FunctionModule) -> int:
    """Number of positions from ``length`` on that a call's new rows take, each of which needs a
    visible column.
    """
    if not isinstance(module, TreeModule):
        return 0
    fused = (
        isinstance(module, StepModule)
        and module.model.streams is not None
        and module.schedule is Schedule.FUSED
    )
    return module.tree.emitted + (module.model.gamma if fused else 0)
