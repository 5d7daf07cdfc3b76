"""The parts of a model that must be computed differently if every intermediate value is a float16.

Root-mean-square norms are computed on rows that are scaled by their largest value: the square of an
activation above 256 does not fit into float16, and such activations are common in trained models.
Masks are numbers that float16 holds. Attention sums over past and new values at once, so that a
drafted row equals the row of plain decoding to the last bit.
"""

import torch
from torch import Tensor, nn

from ssdevice.model.attention import attend_once
from ssdevice.model.operators import Operators, norm_kind, under
from ssdevice.model.step import StreamModel

MASK_VALUE = -1e4
"""Additive mask of an invisible row: float16 holds it, and a fully masked row stays finite."""
SMALLEST_SCALE = 2.0**-6
"""Rows with smaller values are scaled by it: eps divided by its square still fits float16."""


class HalfNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * scale`` within float16: the row is first divided by its largest
    value.

    ``centered``: the row's mean is subtracted first.
    """

    floor: Tensor

    def __init__(self, scale: Tensor, eps: float, centered: bool = False) -> None:
        super().__init__()
        self.centered = centered
        self.scale = nn.Parameter(scale.detach().clone(), requires_grad=False)
        self.root_eps = eps**0.5
        # A buffer, because clamping to a number on one side would write an infinity for the other
        # side.
        self.register_buffer("floor", torch.tensor(SMALLEST_SCALE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., D] -> [.., D]``, row by row."""
        largest = torch.maximum(x.abs().amax(-1, keepdim=True), self.floor)
        row = x / largest
        if self.centered:
            row = row - row.mean(-1, keepdim=True)
        # eps is divided by the square of the scale in two steps, because the square may not fit.
        eps = self.root_eps / largest
        return row * torch.rsqrt((row * row).mean(-1, keepdim=True) + eps * eps) * self.scale


def half_precision(model: StreamModel) -> StreamModel:
    """The same model, computed with intermediate values that float16 holds."""
    return under(model, Operators(attention=attend_once, norm=half_norm, mask_value=MASK_VALUE))


def half_norm(module: nn.Module) -> HalfNorm | None:
    """The HalfNorm that computes the same as a norm module, or None for other modules.

    ``torch.nn.LayerNorm`` is one operation of Core ML and stays.
    """
    kind = norm_kind(module)
    return HalfNorm(kind.scale, kind.eps, kind.centered) if kind is not None else None
