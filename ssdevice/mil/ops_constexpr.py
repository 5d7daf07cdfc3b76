"""Kernels that decompress weights and (de)quantize values.

Weights are decompressed in float32 and rounded once to their declared type. coremltools computes in that type; the
two agree for integer offsets, where the difference is exact and only the product is rounded.
"""

from __future__ import annotations

import numpy as np

from ssdevice.mil.dtypes import DTYPES, unpack
from ssdevice.mil.registry import ExecutionError, Function, Node, Tensor, kernel

_UNSIGNED = {dtype.bits: dtype for dtype in DTYPES if dtype.storage.name == "uint8"}


def _spread(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``values`` repeated along each axis until it has the sizes of ``shape``: one value per block."""
    for axis, size in enumerate(shape):
        if size % values.shape[axis]:
            raise ExecutionError(f"{values.shape[axis]} blocks do not divide axis {axis} of size {size}")
        if values.shape[axis] not in (1, size):
            values = np.repeat(values, size // values.shape[axis], axis)
    return values


def _shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    values = data.astype(np.float32)
    if offset is not None:
        values -= _spread(offset, data.shape)
    values *= _spread(scale, data.shape)
    return values


def _dense(data: Tensor, mask: Tensor) -> Tensor:
    dense = np.zeros(mask.shape, data.dtype)
    dense[mask != 0] = data
    return dense


@kernel("constexpr_blockwise_shift_scale", "data scale offset?", weight=True)
def _blockwise(node: Node) -> Function:
    return lambda data, scale, offset=None: _shift_scale(data, scale, offset)


@kernel("constexpr_sparse_blockwise_shift_scale", "data_mask nonzero_data scale offset?", weight=True)
def _sparse_blockwise(node: Node) -> Function:
    def run(mask: Tensor, data: Tensor, scale: Tensor, offset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return mask, _shift_scale(_dense(data, mask), scale, offset)[mask != 0]

    return run


def _look_up(indices: Tensor, table: Tensor, axis: int | None) -> Tensor:
    """Palette entries: ``table`` [blocks.., palettes, vector] for ``indices``; vectors are laid along ``axis``."""
    palettes, vector = table.shape[-2:]
    if indices.size and int(indices.max()) >= palettes:
        raise ExecutionError(f"palette index {int(indices.max())} of {palettes}")
    # One number per palette in the flattened table, then one table lookup for all elements.
    blocks = np.arange(table.size // (palettes * vector)).reshape(table.shape[:-2])
    flat = _spread(blocks, indices.shape) * palettes + indices
    entries = table.reshape(-1, vector)[flat]
    if vector == 1:
        return entries[..., 0]
    if axis is None:
        raise ExecutionError("a palette of vectors without vector_axis")
    at = axis % indices.ndim
    shape = list(indices.shape)
    shape[at] *= vector
    return np.moveaxis(entries, -1, at + 1).reshape(shape)


@kernel("constexpr_lut_to_dense", "indices lut", weight=True)
def _lut_to_dense(node: Node) -> Function:
    axis = node.integer("vector_axis") if node.has("vector_axis") else None
    if not node.has("shape"):
        return lambda indices, lut: _look_up(indices, lut, axis)
    shape = node.ints("shape")  # the form before opset 18: packed bits and one table

    def run(indices: Tensor, lut: Tensor) -> Tensor:
        bits = max(1, int(lut.size - 1).bit_length())
        return lut[unpack(indices.view(np.uint8), _UNSIGNED[bits], int(np.prod(shape)))].reshape(shape)

    return run


@kernel("constexpr_lut_to_sparse", "indices_mask indices_nonzero_data lut", weight=True)
def _lut_to_sparse(node: Node) -> Function:
    axis = node.integer("vector_axis") if node.has("vector_axis") else None

    def run(mask: Tensor, data: Tensor, lut: Tensor) -> tuple[Tensor, Tensor]:
        values = _look_up(_dense(data, mask), lut, axis)
        if axis is not None and lut.shape[-1] > 1:
            mask = np.repeat(mask, lut.shape[-1], axis)
        return mask, values[mask != 0]

    return run


@kernel("constexpr_sparse_to_dense", "nonzero_data mask", weight=True)
def _sparse_to_dense(node: Node) -> Function:
    if not node.has("shape"):
        return _dense
    shape = node.ints("shape")

    def run(data: Tensor, mask: Tensor) -> Tensor:
        return _dense(data, np.unpackbits(mask, bitorder="little", count=int(np.prod(shape))).reshape(shape))

    return run


@kernel("constexpr_cast", "source_val", weight=True)
def _constexpr_cast(node: Node) -> Function:
    return lambda value: value


def _along(values: Tensor, like: Tensor, axis: int | None) -> Tensor:
    """A vector of per-channel values shaped to broadcast along ``axis``; scalars stay."""
    if values.ndim == 0 or axis is None:
        return values
    shape = [1] * like.ndim
    shape[axis] = -1
    return values.reshape(shape)


@kernel("constexpr_affine_dequantize", "quantized_data scale zero_point", weight=True)
def _affine(node: Node) -> Function:
    axis = node.integer("axis")

    def run(data: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (data.astype(np.float32) - _along(zero, data, axis)) * _along(scale, data, axis)

    return run


@kernel("dequantize", "input scale zero_point?")
def _dequantize(node: Node) -> Function:
    axis = node.integer("axis") if node.has("axis") else None

    def run(data: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        values = data.astype(np.float32)
        if zero is not None:
            values -= _along(zero, data, axis)
        return values * _along(scale, data, axis)

    return run


@kernel("quantize", "input scale zero_point?", exact=True)
def _quantize(node: Node) -> Function:
    axis = node.integer("axis") if node.has("axis") else None
    target = node.cast_type("output_dtype").storage
    low, high = np.iinfo(target).min, np.iinfo(target).max

    def run(data: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        values = np.round(data / _along(scale, data, axis))
        if zero is not None:
            values = values + _along(zero, data, axis)
        return np.clip(values, low, high).astype(target)

    return run
