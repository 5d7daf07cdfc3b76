"""Kernels that work along axes: reductions, normalization, top-k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ssdevice.mil.registry import Function, Node, Tensor, kernel

Reduce = Callable[..., Any]


def _register(kind: str, reduce: Reduce, exact: bool = False) -> None:
    @kernel(kind, "x", exact=exact, sums=not exact)
    def build(node: Node) -> Function:
        axes = tuple(node.ints("axes")) if node.has("axes") else None
        keep = node.flag("keep_dims")
        return lambda x: reduce(x, axis=axes, keepdims=keep)


_register("reduce_sum", np.sum)
_register("reduce_mean", np.mean)
_register("reduce_max", np.max, exact=True)
_register("reduce_min", np.min, exact=True)


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


@kernel("topk", "x", exact=True)
def _topk(node: Node) -> Function:
    k, axis = node.integer("k", 1), node.integer("axis", -1)
    if node.flag("ascending") or not node.flag("return_indices", True):
        raise node.unsupported("ascending order, or values without indices,")

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        # Among equal values the lowest index comes first.
        keys = -x if x.dtype.kind == "f" else -x.astype(np.int64)
        indices = np.take(np.argsort(keys, axis=axis, kind="stable"), range(k), axis=axis)
        return np.take_along_axis(x, indices, axis=axis), indices

    return run
