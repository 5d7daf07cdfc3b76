"""Kernels that multiply matrices: linear, matmul, convolution, attention."""

from __future__ import annotations

import math

import numpy as np

from ssdevice.mil.ops_elementwise import softmax
from ssdevice.mil.registry import Function, Node, Tensor, define, kernel

BLOCK = 1 << 17
"""Elements of a weight that are float64 at a time: few enough to stay near the processor."""


@kernel("linear", "x", sums=True)
def _linear(node: Node) -> Function:
    weight = node.array("weight")
    bias = node.array("bias") if node.has("bias") else None
    if bias is not None and not bias.any():
        bias = None
    width, inputs = weight.shape
    step = max(1, BLOCK // max(1, inputs))

    def run(x: Tensor) -> Tensor:
        rows = x.reshape(-1, inputs)
        out = np.empty((rows.shape[0], width))
        for at in range(0, width, step):
            np.matmul(rows, weight[at : at + step].astype(np.float64).T, out=out[:, at : at + step])
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], width)

    return run


@kernel("matmul", "x y", sums=True)
def _matmul(node: Node) -> Function:
    flip_x, flip_y = node.flag("transpose_x"), node.flag("transpose_y")

    def run(x: Tensor, y: Tensor) -> Tensor:
        if flip_x:
            x = x.swapaxes(-1, -2)
        if flip_y:
            y = y.swapaxes(-1, -2)
        return np.matmul(x, y)

    return run


@kernel("einsum", "values*", sums=True)
def _einsum(node: Node) -> Function:
    equation = node.text("equation")
    return lambda x, y: np.einsum(equation, x, y)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = np.matmul(query, key.swapaxes(-1, -2)) * (1 / math.sqrt(query.shape[-1]))
    if mask is not None:
        scores = np.where(mask, scores, np.float32(-np.inf)) if mask.dtype == np.bool_ else scores + mask
    return np.matmul(softmax(scores, -1), value)


define("scaled_dot_product_attention", "query key value attn_mask?", _attention, sums=True)


@kernel("conv", "x weight", sums=True)
def _conv(node: Node) -> Function:
    rank = len(node.outputs[0].shape) - 2
    strides = node.ints("strides") if node.has("strides") else [1] * rank
    dilations = node.ints("dilations") if node.has("dilations") else [1] * rank
    pads = node.ints("pad") if node.has("pad") else [0] * 2 * rank
    kind, groups = node.text("pad_type", "valid"), node.integer("groups", 1)
    bias = node.array("bias").reshape(-1, *[1] * rank) if node.has("bias") else None
    if kind not in ("valid", "custom", "same", "same_lower"):
        raise node.unsupported(f"pad_type {kind!r}")

    def run(x: Tensor, weight: Tensor) -> Tensor:
        sizes = [(size - 1) * step + 1 for size, step in zip(weight.shape[2:], dilations, strict=True)]
        around = _padding(kind, pads, x.shape[2:], sizes, strides)
        if any(before or after for before, after in around):
            x = np.pad(x, [(0, 0), (0, 0), *around])
        axes = tuple(range(2, 2 + rank))
        windows = np.lib.stride_tricks.sliding_window_view(x, sizes, axes)
        keep = [slice(None, None, step) for step in (*strides, *dilations)]
        windows = windows[(slice(None), slice(None), *keep)]
        inner = windows.reshape(x.shape[0], groups, x.shape[1] // groups, *windows.shape[2:])
        filters = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        # n: batch, g: group, c: channels in, o: channels out, s..: space, k..: kernel
        space, taps = list(range(10, 10 + rank)), list(range(20, 20 + rank))
        out = np.einsum(inner, [0, 1, 2, *space, *taps], filters, [1, 3, 2, *taps], [0, 1, 3, *space], optimize=True)
        out = out.reshape(x.shape[0], weight.shape[0], *out.shape[3:])
        return out if bias is None else out + bias

    return run


def _padding(
    kind: str, pads: list[int], shape: tuple[int, ...], sizes: list[int], strides: list[int]
) -> list[tuple[int, int]]:
    """Elements before and after each spatial axis."""
    if kind == "valid":
        return [(0, 0)] * len(shape)
    if kind == "custom":
        return list(zip(pads[::2], pads[1::2], strict=True))
    around = []
    for length, size, step in zip(shape, sizes, strides, strict=True):
        total = max(0, step * math.ceil(length / step) - length + size - step)
        small, large = total // 2, total - total // 2
        around.append((small, large) if kind == "same" else (large, small))
    return around
