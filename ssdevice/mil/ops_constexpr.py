"""Kernels that decompress weights.

They compute in float32 and round once to the declared type, in which coremltools computes. The results agree for
integer offsets: the difference is exact then, and only the product is rounded.
"""

from __future__ import annotations

import numpy as np

from ssdevice.mil.registry import ExecutionError, Function, Node, Tensor, define, kernel


def _spread(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``values``, one per block, repeated along each axis to the sizes of ``shape``."""
    for axis, size in enumerate(shape):
        if size % values.shape[axis]:
            raise ExecutionError(f"{values.shape[axis]} blocks do not divide axis {axis} of size {size}")
        if values.shape[axis] not in (1, size):
            values = np.repeat(values, size // values.shape[axis], axis)
    return values


def _shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    values = data.astype(np.float32)
    if offset is not None:
        values -= _spread(offset, data.shape)
    values *= _spread(scale, data.shape)
    return values


def _look_up(indices: Tensor, table: Tensor) -> Tensor:
    """Palette entries: ``table`` [blocks.., palettes, 1] for ``indices``."""
    palettes = table.shape[-2]
    if indices.size and int(indices.max()) >= palettes:
        raise ExecutionError(f"palette index {int(indices.max())} of {palettes}")
    # One number per palette in the flattened table, then one table lookup for all elements.
    blocks = np.arange(table.size // palettes).reshape(table.shape[:-2])
    return table.reshape(-1)[_spread(blocks, indices.shape) * palettes + indices]


define("constexpr_blockwise_shift_scale", "data scale offset?", _shift_scale, weight=True)


@kernel("constexpr_lut_to_dense", "indices lut", weight=True)
def _lut_to_dense(node: Node) -> Function:
    if node.has("shape") or node.array("lut").shape[-1] != 1:  # the form before iOS 18, and palettes of vectors
        raise node.unsupported("this form of a palette")
    return _look_up
