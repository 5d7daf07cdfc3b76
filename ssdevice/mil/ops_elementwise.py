"""Elementwise kernels: arithmetic, comparisons, activations, casts; and softmax."""

from __future__ import annotations

import math

import numpy as np

from ssdevice.mil.dtypes import BY_NAME
from ssdevice.mil.registry import Function, Node, Tensor, define, kernel

_ROUNDED: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "real_div": np.true_divide}
_EXACT: dict[str, Function] = {
    "maximum": np.maximum,
    "equal": np.equal,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
}
for _kind, _function in _ROUNDED.items():
    define(_kind, "x y", _function)
for _kind, _function in _EXACT.items():
    define(_kind, "x y", _function, exact=True)
define("abs", "x", np.abs, exact=True)
define("sqrt", "x", np.sqrt)
define("tanh", "x", np.tanh)
define("select", "cond a b", np.where, exact=True)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x). e^-x may overflow to infinity, which gives the right 0."""
    return np.reciprocal(np.float32(1) + np.exp(-x))


def erf(x: Tensor) -> Tensor:
    """The error function within 2e-7, by a rational exponential fit of erfc (Numerical Recipes, section 6.2)."""
    wide = np.abs(x).astype(np.float64)
    t = 1.0 / (1.0 + 0.5 * wide)
    series = np.polynomial.polynomial.polyval(
        t,
        (
            -1.26551223,
            1.00002368,
            0.37409196,
            0.09678418,
            -0.18628806,
            0.27886807,
            -1.13520398,
            1.48851587,
            -0.82215223,
            0.17087277,
        ),
    )
    return np.copysign(1.0 - t * np.exp(series - wide * wide), x).astype(np.float32)


define("erf", "x", erf)
define("sigmoid", "x", sigmoid)
define("silu", "x", lambda x: x * sigmoid(x))
define("softplus", "x", lambda x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0))
define("relu", "x", lambda x: np.maximum(x, 0), exact=True)


@kernel("gelu", "x")
def _gelu(node: Node) -> Function:
    mode = node.text("mode", "EXACT")
    if mode == "EXACT":
        return lambda x: 0.5 * x * (1 + erf(x * np.float32(math.sqrt(0.5))))
    if mode == "TANH_APPROXIMATION":
        root = np.float32(math.sqrt(2 / math.pi))
        return lambda x: 0.5 * x * (1 + np.tanh(root * (x + np.float32(0.044715) * x * x * x)))
    raise node.unsupported(f"mode {mode!r}")


@kernel("softmax", "x")
def _softmax(node: Node) -> Function:
    axis = node.integer("axis", -1)
    return lambda x: softmax(x, axis)


def softmax(x: Tensor, axis: int) -> Tensor:
    """Softmax along ``axis``, shifted by the maximum. The sum is float64, as in kernels that sum."""
    shifted = np.exp(x - x.max(axis=axis, keepdims=True))
    shifted /= shifted.sum(axis=axis, keepdims=True, dtype=np.float64).astype(x.dtype)
    return shifted


@kernel("clip", "x", exact=True)
def _clip(node: Node) -> Function:
    low, high = node.number("alpha"), node.number("beta")
    return lambda x: np.minimum(np.maximum(x, low), high)


@kernel("inverse", "x")
def _inverse(node: Node) -> Function:
    epsilon = node.number("epsilon", 1e-4)
    return lambda x: np.reciprocal(x + epsilon)


@kernel("rsqrt", "x")
def _rsqrt(node: Node) -> Function:
    epsilon = node.number("epsilon", 1e-12)
    return lambda x: np.reciprocal(np.sqrt(x + epsilon))


_FLOATS = {"fp16": "float16", "fp32": "float32"}
"""The names that cast uses."""


@kernel("cast", "x")
def _cast(node: Node) -> Function:
    target = node.text("dtype")
    # Floats are float32 here; every output is rounded to its declared type, which does the narrowing to float16.
    dtype = BY_NAME.get(_FLOATS.get(target, target))
    if dtype is None:
        raise node.unsupported(f"type {target!r}")
    held = dtype.held
    return lambda x: x.astype(held, copy=False)
