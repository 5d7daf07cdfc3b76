"""Kernels that move or repeat elements without looking at their values."""

from __future__ import annotations

import numpy as np

from ssdevice.mil.registry import Function, Node, define, kernel

define("identity", "x", lambda x: x, exact=True)


@kernel("reshape", "x", exact=True)
def _reshape(node: Node) -> Function:
    shape = node.ints("shape")
    return lambda x: x.reshape(shape)


@kernel("transpose", "x", exact=True)
def _transpose(node: Node) -> Function:
    order = node.ints("perm")
    return lambda x: x.transpose(order)


@kernel("expand_dims", "x", exact=True)
def _expand_dims(node: Node) -> Function:
    axes = tuple(node.ints("axes"))
    return lambda x: np.expand_dims(x, axes)


@kernel("split", "x", exact=True)
def _split(node: Node) -> Function:
    axis, ends = node.integer("axis"), np.cumsum(node.ints("split_sizes"))[:-1]
    return lambda x: np.split(x, ends, axis)


@kernel("tile", "x", exact=True)
def _tile(node: Node) -> Function:
    reps = node.ints("reps")
    return lambda x: np.tile(x, reps)


@kernel("concat", "values*", exact=True)
def _concat(node: Node) -> Function:
    axis = node.integer("axis")
    if node.flag("interleave"):
        raise node.unsupported("interleave")
    return lambda *values: np.concatenate(values, axis)


@kernel("stack", "values*", exact=True)
def _stack(node: Node) -> Function:
    axis = node.integer("axis")
    return lambda *values: np.stack(values, axis)
