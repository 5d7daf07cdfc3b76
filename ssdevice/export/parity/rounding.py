"""What rounding changes in the reference's own results."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssdevice.export.parity.difference import Array

LARGEST = 1e30
"""Larger values represent minus infinity and are not rounded."""
EDGE = 2.0**-21
"""A relative change, of four roundings, that moves inputs at a rounding edge by a level and hardly
any other.
"""
DRAWS = 4
"""Of such changes: each moves half of the inputs at an edge."""


class RoundedTo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context the result of every operation on floats is rounded to so many bits of
    significand.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.factor = 2.0 ** (24 - bits) + 1

    def __torch_dispatch__(
        self,
        operation: Any,
        _: object,
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        out = operation(*arguments, **(named or {}))
        if not isinstance(out, Tensor) or out.dtype is not torch.float32 or operation.is_view:
            return out
        shifted = out * self.factor  # Veltkamp's splitting
        return torch.where(out.abs() < LARGEST, shifted - (shifted - out), out)


def moved_by_edges(product: Callable[[Tensor], Array], x: Tensor) -> Array:
    """How far each row of ``product(x) [rows, N]`` moves (rms) if inputs at a rounding edge take
    their other level.
    """
    draw = torch.Generator().manual_seed(0)
    still = product(x)
    moves = [
        product(x * (1 + EDGE * torch.randn(x.shape, generator=draw))) - still for _ in range(DRAWS)
    ]
    rows: Array = np.sqrt(np.square(moves).mean(axis=-1).max(axis=0))
    return rows
