"""Kernels that read or write at computed positions: slices and gathers.

Core ML leaves the result of an out-of-range index undefined. A program that relies on one is wrong on some device, so
it fails here.
"""

from __future__ import annotations

import numpy as np

from ssdevice.mil.registry import ExecutionError, Function, Node, Tensor, kernel


@kernel("slice_by_index", "x", exact=True)
def _slice_by_index(node: Node) -> Function:
    begin, end = node.ints("begin"), node.ints("end")
    stride = node.ints("stride") if node.has("stride") else [1] * len(begin)
    skip_begin, skip_end, squeeze = (
        node.ints(name) if node.has(name) else [0] * len(begin) for name in ("begin_mask", "end_mask", "squeeze_mask")
    )
    parts: list[int | slice] = []
    for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
        start, stop = None if skip_begin[axis] else first, None if skip_end[axis] else last
        parts.append((start or 0) if squeeze[axis] else slice(start, stop, stride[axis]))
    index = tuple(parts)
    return lambda x: x[index]


@kernel("slice_update", "x update begin end", exact=True)
def _slice_update(node: Node) -> Function:
    if any(node.has(name) for name in ("stride", "begin_mask", "end_mask", "squeeze_mask")):
        raise node.unsupported("an update with strides or masks")

    def run(x: Tensor, update: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        places = list(zip(begin.tolist(), end.tolist(), x.shape, strict=True))
        for axis, (first, last, size) in enumerate(places):
            if not 0 <= first <= last <= size:
                raise ExecutionError(f"slice {first}:{last} on axis {axis} of size {size}")
        out = x.copy()
        target = out[tuple(slice(first, last) for first, last, _ in places)]
        if target.shape != update.shape:
            raise ExecutionError(f"an update of shape {list(update.shape)} for a slice of {list(target.shape)}")
        target[...] = update
        return out

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
