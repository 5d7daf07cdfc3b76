"""Bringing results to their declared types, and checking that they have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ssdevice.export.mil.dtypes import Array
from ssdevice.export.mil.registry import ExecutionError
from ssdevice.export.mil.schema import TensorType

Run = Callable[..., Any]
Finish = Callable[[Any], Array]


def round_half(value: Any) -> Array:
    """Values rounded to the nearest float16, held as float32."""
    rounded: Array = value.astype(np.float16).astype(np.float32)
    return rounded


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
