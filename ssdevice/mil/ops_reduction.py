"""Kernels that work along axes: reductions and normalization."""

from __future__ import annotations

import numpy as np

from ssdevice.mil.registry import Function, Node, Tensor, kernel


@kernel("reduce_max", "x", exact=True)
def _reduce_max(node: Node) -> Function:
    axes, keep = tuple(node.ints("axes")), node.flag("keep_dims")
    return lambda x: x.max(axis=axes, keepdims=keep)


@kernel("reduce_mean", "x", sums=True)
def _reduce_mean(node: Node) -> Function:
    axes, keep = tuple(node.ints("axes")), node.flag("keep_dims")
    return lambda x: x.mean(axis=axes, keepdims=keep)


@kernel("reduce_argmax", "x", exact=True)
def _argmax(node: Node) -> Function:
    axis, keep = node.integer("axis", -1), node.flag("keep_dims")
    # MIL does not specify ties. Here the lowest index wins, as in NumPy and in the step contract.
    return lambda x: np.argmax(x, axis=axis, keepdims=keep)


@kernel("layer_norm", "x", sums=True)
def _layer_norm(node: Node) -> Function:
    epsilon = node.number("epsilon", 1e-5)
    gamma = node.array("gamma") if node.has("gamma") else None
    beta = node.array("beta") if node.has("beta") else None
    wanted = node.ints("axes") if node.has("axes") else None

    def run(x: Tensor) -> Tensor:
        axes = tuple(sorted(axis % x.ndim for axis in (wanted or range(x.ndim))))
        shape = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
        centred = x - x.mean(axis=axes, keepdims=True)
        out = centred / np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + epsilon)
        if gamma is not None:
            out = out * gamma.reshape(shape)
        return out if beta is None else out + beta.reshape(shape)

    return run
