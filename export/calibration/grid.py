"""What a target's round-to-nearest makes of a matrix: blocks of inputs with one scale each, fixed by one weight.

Values that lie on a grid come out of the target's own rounding as they went in, as long as every block keeps the weight
that fixed its scale, its anchor, at the code that made it so. Scales are bfloat16 numbers: a code times such a scale is
exact in float16, and XNNPACK keeps no more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Anchors = tuple[Tensor, Tensor, Tensor]
"""Of blocks ``[.., n]``: the anchor's place in its block ``[..]``, its code ``[..]``, and the scale ``[..]``."""


def lowest(blocks: Tensor) -> Anchors:
    """The largest magnitude gets code -8, whatever its sign: the scale takes the sign over."""
    at = blocks.abs().argmax(-1)
    code = torch.full(at.shape, -8.0)
    return at, code, _taken(blocks, at) / code


def symmetric(blocks: Tensor) -> Anchors:
    """The largest magnitude gets code -7 or 7; no other code is beyond."""
    at = blocks.abs().argmax(-1)
    peak = _taken(blocks, at)
    code = torch.where(peak < 0, -7.0, 7.0)
    return at, code, peak / code


def unclipped(blocks: Tensor) -> Anchors:
    """Code -8 for a negative weight or 7 for a positive one, whichever needs the larger scale."""
    reach = torch.where(blocks < 0, blocks / -8, blocks / 7)
    at = reach.argmax(-1)
    peak = _taken(blocks, at)
    code = torch.where(peak < 0, -8.0, 7.0)
    return at, code, peak / code


def _taken(blocks: Tensor, at: Tensor) -> Tensor:
    return blocks.gather(-1, at[..., None])[..., 0]


@dataclass(frozen=True)
class Grid:
    """``block``: inputs that share a scale, None for all of a row. ``anchors``: how a target finds scales.

    ``low``, ``high``: its codes.
    """

    block: int | None
    anchors: Callable[[Tensor], Anchors]
    low: int
    high: int
