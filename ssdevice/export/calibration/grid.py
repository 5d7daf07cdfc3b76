"""What a target's round-to-nearest makes of a matrix, and rounding to such a grid so that products
change least.

A grid has blocks of inputs with one scale each, fixed by one weight. Values on it come out of the
target's own rounding as they went in, as long as every block keeps the weight that fixed its scale,
its anchor, at the code that made it so. Scales are bfloat16 numbers: a code times such a scale is
exact in float16, and XNNPACK keeps no more of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Anchors = tuple[Tensor, Tensor, Tensor]
"""Of blocks ``[.., n]``: the anchor's place in its block ``[..]``, its code ``[..]``, and the scale
``[..]``.
"""
Anchor = Callable[[Tensor, int, int], Anchors]
"""How a target finds the anchors of ``blocks [.., n]``, given its lowest and highest code."""


def lowest(blocks: Tensor, low: int, high: int) -> Anchors:
    """The largest magnitude gets the lowest code, whatever its sign: the scale takes that over."""
    return _anchored(blocks, blocks.abs(), low, low)


def symmetric(blocks: Tensor, low: int, high: int) -> Anchors:
    """The largest magnitude gets the code at the end of its sign; no other code is beyond."""
    return _anchored(blocks, blocks.abs(), low, high)


def unclipped(blocks: Tensor, low: int, high: int) -> Anchors:
    """The lowest code for a negative weight, the highest for a positive one, whichever needs the
    larger scale.
    """
    return _anchored(blocks, torch.where(blocks < 0, blocks / low, blocks / high), low, high)


def _anchored(blocks: Tensor, reach: Tensor, negative: float, positive: float) -> Anchors:
    """The weight with the largest ``reach`` gets the code of its sign."""
    at = reach.argmax(-1)
    peak = blocks.gather(-1, at[..., None])[..., 0]
    code = torch.where(peak < 0, float(negative), float(positive))
    return at, code, peak / code


class Rounded(NamedTuple):
    """A matrix ``[N, inputs]`` on a grid: ``codes [N, blocks, block]`` int8, ``scale [N, blocks]``
    float32.
    """

    codes: Tensor
    scale: Tensor
    inputs: int

    def dequantized(self) -> Tensor:
        """``[N, inputs]`` float32."""
        values = self.codes.float().mul_(self.scale[..., None])
        return values.reshape(len(values), -1)[:, : self.inputs]


@dataclass(frozen=True)
class Grid:
    """``block``: inputs that share a scale, None for all of a row.

    ``anchor``: how a target finds scales. ``low``, ``high``: its codes. ``scales``: the type whose
    numbers scales are. ``empty``: the scale of a block of zeros.
    """

    block: int | None
    anchor: Anchor
    low: int
    high: int
    scales: torch.dtype = torch.float32
    empty: float = 1.0

    def blocks(self, weight: Tensor) -> Tensor:
        """``[N, inputs] -> [N, blocks, block]``, padded with zeros."""
        outputs, inputs = weight.shape
        block = self.block or inputs
        padded = torch.nn.functional.pad(weight, (0, -inputs % block))
        return padded.reshape(outputs, -1, block)

    def anchors(self, blocks: Tensor) -> Anchors:
        """What fixes the scales of ``blocks [.., n]``."""
        return self.anchor(blocks, self.low, self.high)

    def levels(self, values: Tensor, scale: Tensor) -> Tensor:
        """The nearest codes, as floats: the only place where weights are rounded to integers."""
        return (values / scale).round_().clamp_(self.low, self.high)

    def rounded(self, weight: Tensor) -> Rounded:
        """``weight [N, inputs]`` rounded to nearest."""
        blocks = self.blocks(weight)
        scale = self.anchors(blocks)[2].to(self.scales).float()
        step = torch.where(scale != 0, scale, 1.0)
        codes = self.levels(blocks, step[..., None]).to(torch.int8)
        return Rounded(codes, torch.where(scale != 0, scale, self.empty), weight.shape[1])


DAMPING = 0.01
"""Added to the moments' diagonal, relative to its mean: what rows this few say of inputs is
uncertain.
"""
CHUNK = 128
"""Columns that are rounded before their errors are spread over all later ones at once."""
SHRINK = tuple(1 - 0.05 * i for i in range(9))
"""Scales that are tried, relative to round-to-nearest's: a block with one large weight gains by
clipping it.
"""

SILENT = 1e-30
"""Scales below it are those of blocks of zeros."""


def calibrated(weight: Tensor, moments: Tensor, grid: Grid) -> Tensor:
    """``weight [N, K]`` on the grid, for inputs with the second moments ``moments [K, K]``."""
    outputs, inputs = weight.shape
    block = grid.block or inputs
    blocks = -(-inputs // block)
    padded = grid.blocks(weight)
    importance = torch.nn.functional.pad(moments.diagonal(), (0, blocks * block - inputs)).reshape(
        blocks, block
    )
    at, anchor, largest = grid.anchors(padded)
    silent = largest.abs() < SILENT
    largest = torch.where(silent, 0.0, largest)
    scale = _scales(padded, importance, largest, grid)
    forced = torch.full((outputs, blocks, block), torch.nan)
    anchor = torch.where(silent, torch.nan, anchor)  # zeros have no scale that a code could keep
    forced.scatter_(-1, at[..., None], anchor[..., None])
    forced = forced.reshape(outputs, -1)[:, :inputs]
    by_column = scale.repeat_interleave(block, 1)[:, :inputs]
    order = moments.diagonal().argsort(descending=True)
    values = _fed_back(
        weight[:, order], forced[:, order], by_column[:, order], _feedback(moments, order), grid
    )
    return torch.empty_like(weight).index_copy_(1, order, values)


def _scales(blocks: Tensor, importance: Tensor, largest: Tensor, grid: Grid) -> Tensor:
    """Scales ``[N, blocks]``: of those tried, which costs least where inputs are independent."""
    best = torch.full(largest.shape, torch.inf)
    scale = torch.ones_like(largest)
    for shrink in SHRINK:
        tried = (largest * shrink).bfloat16().float()
        tried = torch.where(tried == 0, 1.0, tried)
        rounded = grid.levels(blocks, tried[..., None]) * tried[..., None]
        cost = ((rounded - blocks).square() * importance).sum(-1)
        better = cost < best
        best, scale = torch.where(better, cost, best), torch.where(better, tried, scale)
    return scale


def _feedback(moments: Tensor, order: Tensor) -> Tensor:
    """``[K, K]`` upper: row i spreads the error of column i, divided by its diagonal, over later
    columns.
    """
    ordered = moments[order][:, order].double()
    ordered.diagonal().add_(DAMPING * ordered.diagonal().mean().clamp_min(1e-12))
    factor: Tensor = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(ordered)), upper=True
    )
    return factor.float()


def _fed_back(
    weight: Tensor, forced: Tensor, scale: Tensor, feedback: Tensor, grid: Grid
) -> Tensor:
    """The rounding itself, columns in order; ``forced [N, K]``: codes of anchors, NaN elsewhere."""
    rest = weight.T.contiguous()
    forced, scale = forced.T.contiguous(), scale.T.contiguous()
    out = torch.empty_like(rest)
    for first in range(0, len(rest), CHUNK):
        last = min(first + CHUNK, len(rest))
        errors = torch.zeros(last - first, rest.shape[1])
        for i in range(first, last):
            code = grid.levels(rest[i], scale[i])
            code = torch.where(forced[i].isnan(), code, forced[i])
            out[i] = code * scale[i]
            error = (rest[i] - out[i]) / feedback[i, i]
            rest[i + 1 : last].addr_(feedback[i, i + 1 : last], error, alpha=-1)
            errors[i - first] = error
        rest[last:].addmm_(feedback[first:last, last:].T, errors, alpha=-1)
    return out.T.contiguous()
