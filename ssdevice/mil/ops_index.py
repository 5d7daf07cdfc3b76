"""Kernels that read or write at computed places: slices, gathers, scatters.

Indices are checked where Core ML leaves the result undefined: a program that needs an out-of-range index to do
something in particular is wrong on some device, so it fails here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ssdevice.mil.registry import ExecutionError, Function, Node, Tensor, kernel

Index = tuple[Any, ...]
NEGATIVE_INDICES_UNTIL = 16  # from opset 17 on a negative index is out of range


def _masks(node: Node, rank: int) -> list[list[bool]]:
    names = ("begin_mask", "end_mask", "squeeze_mask")
    return [[bool(flag) for flag in node.ints(name)] if node.has(name) else [False] * rank for name in names]


def _slicer(node: Node) -> Callable[[tuple[int, ...], list[int], list[int]], Index]:
    """A function from shape, begin and end to a NumPy index, with the operation's strides and masks."""
    shape = node.outputs[0].shape
    rank = len(node.ints("stride")) if node.has("stride") else None
    for name in ("begin_mask", "end_mask", "squeeze_mask"):
        if rank is None and node.has(name):
            rank = len(node.ints(name))
    rank = len(shape) if rank is None else rank
    stride = node.ints("stride") if node.has("stride") else [1] * rank
    skip_begin, skip_end, squeeze = _masks(node, rank)

    def index(shape: tuple[int, ...], begin: list[int], end: list[int]) -> Index:
        if not len(shape) == len(begin) == len(end) == rank:
            raise ExecutionError(f"begin {begin} and end {end} do not fit shape {list(shape)}")
        parts: list[Any] = []
        for axis, size in enumerate(shape):
            first = 0 if skip_begin[axis] and squeeze[axis] else begin[axis]
            if squeeze[axis]:
                first += size if first < 0 else 0
                if not 0 <= first < size:
                    raise ExecutionError(f"index {begin[axis]} on axis {axis} of size {size}")
                parts.append(first)
                continue
            start = None if skip_begin[axis] else begin[axis]
            stop = None if skip_end[axis] else end[axis]
            parts.append(slice(start, stop, stride[axis]))
        return tuple(parts)

    return index


def _checked(shape: tuple[int, ...], index: Index) -> Index:
    """The index itself, if its forward slices lie within the shape: at run time nothing may be cut silently."""
    for axis, part in enumerate(index):
        if isinstance(part, slice) and (part.step or 1) > 0:
            size = shape[axis]
            first, last = part.start or 0, size if part.stop is None else part.stop
            first, last = first + size * (first < 0), last + size * (last < 0)
            if not 0 <= first <= last <= size:
                raise ExecutionError(f"slice {part.start}:{part.stop} on axis {axis} of size {size}")
    return index


@kernel("slice_by_index", "x", view=True)
def _slice_by_index(node: Node) -> Function:
    solve = _slicer(node)
    if node.known("begin") and node.known("end"):
        begin, end = node.ints("begin"), node.ints("end")
        solved: dict[tuple[int, ...], Index] = {}

        def run(x: Tensor) -> Tensor:
            index = solved.get(x.shape)
            if index is None:
                index = solved[x.shape] = solve(x.shape, begin, end)
            return x[index]

        return run
    node.take("x", "begin", "end")
    return lambda x, begin, end: x[_checked(x.shape, solve(x.shape, begin.tolist(), end.tolist()))]


@kernel("slice_by_size", "x begin size", view=True)
def _slice_by_size(node: Node) -> Function:
    def run(x: Tensor, begin: Tensor, size: Tensor) -> Tensor:
        parts = []
        for axis, (first, count) in enumerate(zip(begin.tolist(), size.tolist(), strict=True)):
            first += x.shape[axis] if first < 0 else 0
            parts.append(slice(first, x.shape[axis] if count == -1 else first + count))
        return x[_checked(x.shape, tuple(parts))]

    return run


@kernel("slice_update", "x update begin end", updates=True)
def _slice_update(node: Node) -> Function:
    solve = _slicer(node)

    def run(x: Tensor, update: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        target = x[_checked(x.shape, solve(x.shape, begin.tolist(), end.tolist()))]
        if math.prod(target.shape) != math.prod(update.shape):
            raise ExecutionError(f"an update of shape {list(update.shape)} for a slice of {list(target.shape)}")
        target[...] = update.reshape(target.shape)
        return x

    return run


def _in_range(indices: Tensor, size: int, opset: int) -> Tensor:
    """The indices, if all lie in [0, size); before opset 17 negative ones count from the end."""
    if not indices.size:
        return indices
    low, high = int(indices.min()), int(indices.max())
    if high >= size or low < (-size if opset <= NEGATIVE_INDICES_UNTIL else 0):
        raise ExecutionError(f"index {high if high >= size else low} is out of range for size {size}")
    return indices


@kernel("gather", "x indices", exact=True)
def _gather(node: Node) -> Function:
    axis, batch, opset = node.integer("axis", 0), node.integer("batch_dims", 0), node.opset
    if not batch:
        return lambda x, indices: np.take(x, _in_range(indices, x.shape[axis], opset), axis)

    def run(x: Tensor, indices: Tensor) -> Tensor:
        at = axis % x.ndim
        indices = _in_range(indices, x.shape[at], opset)
        moved = np.moveaxis(x, at, batch)  # [batch.., gathered, between.., after..]
        grid = np.ogrid[tuple(slice(size) for size in x.shape[:batch])] if batch else []
        extra = indices.ndim - batch
        grid = [np.reshape(part, part.shape + (1,) * extra) for part in grid]
        taken = moved[(*grid, indices)]  # [batch.., indices.., between.., after..]
        between = at - batch
        order = [
            *range(batch),
            *range(batch + extra, batch + extra + between),
            *range(batch, batch + extra),
            *range(batch + extra + between, taken.ndim),
        ]
        return taken.transpose(order)

    return run


@kernel("gather_along_axis", "x indices", exact=True)
def _gather_along_axis(node: Node) -> Function:
    axis, opset = node.integer("axis", 0), node.opset
    return lambda x, indices: np.take_along_axis(x, _in_range(indices, x.shape[axis], opset).astype(np.intp), axis)


def _places(indices: Tensor, shape: tuple[int, ...], opset: int) -> Index:
    """Index arrays from rows of coordinates: ``indices`` [.., n] into the first n axes of ``shape``."""
    return tuple(_in_range(indices[..., axis], shape[axis], opset) for axis in range(indices.shape[-1]))


@kernel("gather_nd", "x indices", exact=True)
def _gather_nd(node: Node) -> Function:
    batch, opset = node.integer("batch_dims", 0), node.opset

    def run(x: Tensor, indices: Tensor) -> Tensor:
        grid = np.ogrid[tuple(slice(size) for size in x.shape[:batch])] if batch else []
        extra = indices.ndim - 1 - batch
        grid = [np.reshape(part, part.shape + (1,) * extra) for part in grid]
        return x[(*grid, *_places(indices, x.shape[batch:], opset))]

    return run


_AT: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}
MODES = ("update", *_AT)


def _writer(node: Node) -> Callable[[Tensor, Index, Tensor], Tensor]:
    """How the operation's mode puts updates at an index; of equal indices in mode ``update`` the last one wins."""
    mode = node.text("mode", "add")
    if mode not in MODES:
        raise node.unsupported(f"mode {mode!r}")
    if mode == "update":

        def put(data: Tensor, index: Index, updates: Tensor) -> Tensor:
            data[index] = updates
            return data

        return put
    combine = _AT[mode]
    node.exact = mode in ("max", "min")

    def apply(data: Tensor, index: Index, updates: Tensor) -> Tensor:
        combine.at(data, index, updates)
        return data

    return apply


@kernel("scatter", "data indices updates", updates=True)
def _scatter(node: Node) -> Function:
    axis, write, opset = node.integer("axis", 0), _writer(node), node.opset

    def run(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        at = axis % data.ndim
        return write(data, (*(slice(None),) * at, _in_range(indices, data.shape[at], opset)), updates)

    return run


@kernel("scatter_nd", "data indices updates", updates=True)
def _scatter_nd(node: Node) -> Function:
    write, opset = _writer(node), node.opset
    return lambda data, indices, updates: write(data, _places(indices, data.shape, opset), updates)


@kernel("scatter_along_axis", "data indices updates", updates=True)
def _scatter_along_axis(node: Node) -> Function:
    axis, write, opset = node.integer("axis", 0), _writer(node), node.opset

    def run(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        at = axis % data.ndim
        index: list[Any] = list(np.ogrid[tuple(slice(size) for size in indices.shape)])
        index[at] = _in_range(indices, data.shape[at], opset)
        return write(data, tuple(index), updates)

    return run
