"""Kernels that multiply matrices."""

from __future__ import annotations

import numpy as np

from ssdevice.mil.registry import Function, Node, Tensor, kernel

BLOCK = 1 << 17
"""Elements of a weight that are widened to float64 at a time: few enough to stay in the processor's cache."""


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
