"""Kernels that read or write at computed positions: slices and gathers.

Core ML leaves the result of an out-of-range index undefined. A program that relies on one is wrong on some device, so
it fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ssdevice.mil.registry import ExecutionError, Function, Node, Tensor, kernel

Index = tuple[Any, ...]


def _slicer(node: Node, cut: bool = False) -> Callable[[Tensor, Tensor, Tensor], Index]:
    """A function that maps an array, begin and end to a NumPy index, using the operation's strides and masks.

    A slice beyond the array raises ExecutionError. With ``cut`` it is clipped, which is allowed for constant bounds.
    """

    names = ("begin_mask", "end_mask", "squeeze_mask")
    masks = [node.ints(name) if node.has(name) else None for name in names]
    strides = node.ints("stride") if node.has("stride") else None

    def index(x: Tensor, begin: Tensor, end: Tensor) -> Index:
        rank = x.ndim
        stride = strides or [1] * rank
        skip_begin, skip_end, squeeze = (mask or [0] * rank for mask in masks)
        if {len(begin), len(end), len(stride), len(skip_begin), len(skip_end), len(squeeze)} != {rank}:
            raise ExecutionError(f"begin {begin.tolist()} and end {end.tolist()} do not fit shape {list(x.shape)}")
        parts: list[Any] = []
        for axis, (size, first, last) in enumerate(zip(x.shape, begin.tolist(), end.tolist(), strict=True)):
            if squeeze[axis]:
                first = 0 if skip_begin[axis] else first + size * (first < 0)
                if not 0 <= first < size:
                    raise ExecutionError(f"index {first} on axis {axis} of size {size}")
                parts.append(first)
                continue
            part = slice(None if skip_begin[axis] else first, None if skip_end[axis] else last, stride[axis])
            parts.append(part if cut else _checked(part, size, axis))
        return tuple(parts)

    return index


def _checked(part: slice, size: int, axis: int) -> slice:
    """The slice itself. Raises ExecutionError if it leaves the axis: run-time bounds are never clipped silently."""
    if (part.step or 1) > 0:
        first, last = part.start or 0, size if part.stop is None else part.stop
        first, last = first + size * (first < 0), last + size * (last < 0)
        if not 0 <= first <= last <= size:
            raise ExecutionError(f"slice {part.start}:{part.stop} on axis {axis} of size {size}")
    return part


@kernel("slice_by_index", "x begin end", view=True)
def _slice_by_index(node: Node) -> Function:
    solve = _slicer(node, cut=node.known("begin") and node.known("end"))
    return lambda x, begin, end: x[solve(x, begin, end)]


@kernel("slice_by_size", "x begin size", view=True)
def _slice_by_size(node: Node) -> Function:
    def run(x: Tensor, begin: Tensor, size: Tensor) -> Tensor:
        parts = []
        for axis, (first, count) in enumerate(zip(begin.tolist(), size.tolist(), strict=True)):
            first += x.shape[axis] if first < 0 else 0
            parts.append(_checked(slice(first, x.shape[axis] if count == -1 else first + count), x.shape[axis], axis))
        return x[tuple(parts)]

    return run


@kernel("slice_update", "x update begin end", updates=True)
def _slice_update(node: Node) -> Function:
    solve = _slicer(node)

    def run(x: Tensor, update: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        target = x[solve(x, begin, end)]
        if target.size != update.size:
            raise ExecutionError(f"an update of shape {list(update.shape)} for a slice of {list(target.shape)}")
        target[...] = update.reshape(target.shape)
        return x

    return run


def _in_range(indices: Tensor, size: int) -> Tensor:
    """The indices, which must lie in [0, size): since iOS 17 negative ones do not count from the end."""
    if not indices.size:
        return indices
    low, high = int(indices.min()), int(indices.max())
    if high >= size or low < 0:
        raise ExecutionError(f"index {high if high >= size else low} is out of range for size {size}")
    return indices


@kernel("gather", "x indices", exact=True)
def _gather(node: Node) -> Function:
    axis = node.integer("axis", 0)
    if node.integer("batch_dims", 0):
        raise node.unsupported("batch_dims")
    return lambda x, indices: np.take(x, _in_range(indices, x.shape[axis]), axis)


@kernel("gather_along_axis", "x indices", exact=True)
def _gather_along_axis(node: Node) -> Function:
    axis = node.integer("axis", 0)
    return lambda x, indices: np.take_along_axis(x, _in_range(indices, x.shape[axis]).astype(np.intp), axis)
