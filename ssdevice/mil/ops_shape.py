"""Kernels that move or repeat elements without looking at their values."""

from __future__ import annotations

import numpy as np

from ssdevice.mil.registry import Function, Node, Tensor, define, kernel

define("identity", "x", lambda x: x, view=True)


@kernel("reshape", "x", view=True)
def _reshape(node: Node) -> Function:
    wanted = node.ints("shape")

    def run(x: Tensor) -> Tensor:
        # 0 keeps the size of its axis if the ranks agree; NumPy resolves -1.
        keep = len(wanted) == x.ndim
        return x.reshape([x.shape[axis] if keep and not size else size for axis, size in enumerate(wanted)])

    return run if 0 in wanted else lambda x: x.reshape(wanted)


@kernel("transpose", "x", view=True)
def _transpose(node: Node) -> Function:
    order = node.ints("perm")
    return lambda x: x.transpose(order)


@kernel("expand_dims", "x", view=True)
def _expand_dims(node: Node) -> Function:
    axes = tuple(node.ints("axes"))
    return lambda x: np.expand_dims(x, axes)


@kernel("squeeze", "x", view=True)
def _squeeze(node: Node) -> Function:
    if not node.has("axes"):
        return lambda x: np.squeeze(x)
    axes = node.ints("axes")
    # Sizes other than 1 stay, as in torch.
    return lambda x: np.squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


@kernel("split", "x", view=True)
def _split(node: Node) -> Function:
    axis = node.integer("axis")
    if len(node.outputs) == 1:
        return lambda x: x
    parts = np.cumsum(node.ints("split_sizes"))[:-1] if node.has("split_sizes") else node.integer("num_splits")
    return lambda x: np.split(x, parts, axis)


@kernel("tile", "x", exact=True)
def _tile(node: Node) -> Function:
    reps = node.ints("reps")
    return lambda x: np.tile(x, reps)


@kernel("concat", "values*", exact=True)
def _concat(node: Node) -> Function:
    axis = node.integer("axis")
    if node.flag("interleave"):
        raise node.unsupported("interleave")
    if len(node.outputs[0].shape) == 1:
        # Scalars count as vectors of one element: programs assemble slice bounds this way.
        return lambda *values: np.concatenate([np.reshape(value, -1) for value in values])
    return lambda *values: np.concatenate(values, axis)


@kernel("stack", "values*", exact=True)
def _stack(node: Node) -> Function:
    axis = node.integer("axis")
    return lambda *values: np.stack(values, axis)
