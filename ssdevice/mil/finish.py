"""Bringing results to their declared types, and checking that they have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ssdevice.mil.dtypes import Array
from ssdevice.mil.registry import ExecutionError
from ssdevice.mil.schema import TensorType

Run = Callable[..., Any]
Finish = Callable[[Any], Array]


# Below this many elements NumPy's own conversion is faster than the seven passes of _round_many.
MANY = 2048
LARGEST_HALF = np.float32(65504)
_EXPONENT = np.uint32(0x7F800000)
_SMALLEST_NORMAL = np.uint32(0x38800000)  # 2**-14 as float32 bits: below it float16 has one spacing
_SHIFT = np.uint32((13 << 23) + (1 << 22))  # times 2**13, and half as much again


def round_half(value: Any) -> Array:
    """Values rounded to the nearest float16, ties to even, held as float32; zeros may lose their sign."""
    single = value.astype(np.float32, copy=False)
    if value.size > MANY:
        return _round_many(single)
    rounded: Array = single.astype(np.float16).astype(np.float32)
    return rounded


def _round_many(value: Array) -> Array:
    """Rounding by adding and subtracting 1.5·2^(e+13), e the element's exponent: 23 - 13 bits of it are left.

    The sum's spacing is that of float16 at this exponent, also for subnormal results since e is at least -14, and
    the addition rounds to even. Three times as fast as converting; overflow and NaN are left to the conversion.
    """
    bits = np.bitwise_and(value.view(np.uint32), _EXPONENT)
    np.maximum(bits, _SMALLEST_NORMAL, out=bits)
    np.add(bits, _SHIFT, out=bits)
    large = bits.view(np.float32)
    rounded: Array = value + large
    np.subtract(rounded, large, out=rounded)
    if rounded.max() <= LARGEST_HALF and rounded.min() >= -LARGEST_HALF:
        return rounded
    converted: Array = value.astype(np.float16).astype(np.float32)
    return converted


def to(dtype: np.dtype[Any]) -> Finish:
    """A function that converts to ``dtype`` where needed."""
    return lambda value: value if value.dtype == dtype else value.astype(dtype)


TO_FLOAT = to(np.dtype(np.float32))


def finished(run: Run, finish: list[Finish | None]) -> Run:
    """``run`` with its output, or each of its outputs, brought to the declared type."""
    if len(finish) == 1:
        one = finish[0]
        return run if one is None else lambda *operands: one(run(*operands))
    if not any(finish):
        return run
    pairs = list(finish)
    return lambda *operands: [
        value if one is None else one(value) for one, value in zip(pairs, run(*operands), strict=True)
    ]


def check_type(value: Any, kind: TensorType, where: str) -> None:
    """Raises ExecutionError if an array is not what the program declares."""
    shape = np.shape(value)
    fits = len(shape) == len(kind.shape) and all(b is None or a == b for a, b in zip(shape, kind.shape, strict=True))
    # A scalar may be declared as a vector of one element and the other way round.
    if not fits and not (math.prod(shape) == 1 == kind.count):
        raise ExecutionError(f"{where}: its result has shape {list(shape)}, the program declares {list(kind.shape)}")
    if kind.dtype is not None:
        expected = np.dtype(np.float32) if kind.dtype.floating else kind.dtype.storage
        if np.asarray(value).dtype != expected:
            raise ExecutionError(f"{where}: its result is {np.asarray(value).dtype}, declared {kind.dtype.name}")
