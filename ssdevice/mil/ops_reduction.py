"""Kernels that work along axes: reductions, normalizations, sums, sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ssdevice.mil.registry import Function, Node, Tensor, kernel

MAX_ROUNDS = 16  # up to this k, rounds of argmax beat a full sort of a vocabulary
Reduce = Callable[..., Any]


def _log_sum_exp(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    top = x.max(axis=axis, keepdims=True)
    total = np.log(np.exp(x - top).sum(axis=axis, keepdims=True)) + top
    return total if keepdims else total.reshape(x.sum(axis=axis).shape)


def _register(kind: str, reduce: Reduce, exact: bool = False) -> None:
    @kernel(kind, "x", exact=exact, sums=not exact)
    def build(node: Node) -> Function:
        axes = tuple(node.ints("axes")) if node.has("axes") else None
        keep = node.flag("keep_dims")
        return lambda x: reduce(x, axis=axes, keepdims=keep)


_register("reduce_sum", np.sum)
_register("reduce_mean", np.mean)
_register("reduce_prod", np.prod)
_register("reduce_max", np.max, exact=True)
_register("reduce_min", np.min, exact=True)
_register("reduce_sum_square", lambda x, axis, keepdims: np.sum(x * x, axis=axis, keepdims=keepdims))
_register("reduce_l1_norm", lambda x, axis, keepdims: np.sum(np.abs(x), axis=axis, keepdims=keepdims))
_register("reduce_l2_norm", lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims)))
_register("reduce_log_sum", lambda x, axis, keepdims: np.log(np.sum(x, axis=axis, keepdims=keepdims)))
_register("reduce_log_sum_exp", _log_sum_exp)


def _register_arg(kind: str, reduce: Reduce) -> None:
    @kernel(kind, "x", exact=True)
    def build(node: Node) -> Function:
        axis, keep = node.integer("axis", -1), node.flag("keep_dims")
        return lambda x: reduce(x, axis=axis, keepdims=keep)


# The MIL specification leaves ties open; here, as in NumPy and in the step contract, the lowest index wins.
_register_arg("reduce_argmax", np.argmax)
_register_arg("reduce_argmin", np.argmin)


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


@kernel("l2_norm", "x", sums=True)
def _l2_norm(node: Node) -> Function:
    epsilon = node.number("epsilon", 1e-6)
    return lambda x: x / np.sqrt((x * x).sum(axis=(-3, -2, -1), keepdims=True) + epsilon)


@kernel("batch_norm", "x")
def _batch_norm(node: Node) -> Function:
    scale = np.reciprocal(np.sqrt(node.array("variance") + node.number("epsilon", 1e-5)))
    if node.has("gamma"):
        scale = scale * node.array("gamma")
    shift = -node.array("mean") * scale
    if node.has("beta"):
        shift = shift + node.array("beta")

    def run(x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.ndim - 2))
        return x * scale.reshape(shape) + shift.reshape(shape)

    return run


@kernel("instance_norm", "x", sums=True)
def _instance_norm(node: Node) -> Function:
    epsilon = node.number("epsilon", 1e-5)
    gamma = node.array("gamma") if node.has("gamma") else None
    beta = node.array("beta") if node.has("beta") else None

    def run(x: Tensor) -> Tensor:
        axes = tuple(range(2, x.ndim))
        shape = (1, -1, *[1] * (x.ndim - 2))
        centred = x - x.mean(axis=axes, keepdims=True)
        out = centred / np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + epsilon)
        if gamma is not None:
            out = out * gamma.reshape(shape)
        return out if beta is None else out + beta.reshape(shape)

    return run


@kernel("cumsum", "x", sums=True)
def _cumsum(node: Node) -> Function:
    axis, exclusive, reverse = node.integer("axis", 0), node.flag("exclusive"), node.flag("reverse")

    def run(x: Tensor) -> Tensor:
        source = np.flip(x, axis) if reverse else x
        total = np.cumsum(source, axis=axis, dtype=source.dtype)
        if exclusive:
            total = total - source
        return np.flip(total, axis) if reverse else total

    return run


def _sortable(x: Tensor, ascending: bool) -> Tensor:
    """Keys whose ascending stable order is the wanted one."""
    if ascending:
        return x
    return -x if x.dtype.kind == "f" else -x.astype(np.int64)


@kernel("argsort", "x", exact=True)
def _argsort(node: Node) -> Function:
    axis, ascending = node.integer("axis", -1), node.flag("ascending")
    return lambda x: np.argsort(_sortable(x, ascending), axis=axis, kind="stable")


@kernel("topk", "x", exact=True)
def _topk(node: Node) -> Function:
    k, axis, ascending = node.integer("k", 1), node.integer("axis", -1), node.flag("ascending")
    with_indices = node.flag("return_indices", True)

    def run(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        count = x.shape[axis] if k < 0 else k
        indices = top_indices(_sortable(x, ascending), count, axis)
        values = np.take_along_axis(x, indices, axis=axis)
        return (values, indices) if with_indices else values

    return run


def top_indices(keys: Tensor, count: int, axis: int) -> Tensor:
    """Indices of the ``count`` smallest keys along ``axis``, smallest first, ties to the lowest index."""
    if count > MAX_ROUNDS or keys.dtype != np.float32 or not np.isfinite(keys.max()):
        order = np.argsort(keys, axis=axis, kind="stable")
        return np.take(order, range(count), axis=axis)
    keys = keys.copy()
    rounds = []
    for _ in range(count):
        best = np.argmin(keys, axis=axis, keepdims=True)
        np.put_along_axis(keys, best, np.float32(np.inf), axis=axis)
        rounds.append(best)
    return np.concatenate(rounds, axis=axis)
