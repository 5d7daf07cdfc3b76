"""The KV cache outside the graph: the host passes committed rows and gets new ones back."""

import mmap
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ssdevice.contract import Geometry
from ssdevice.errors import InputError

BUCKET = 32  # a masked row costs a step of a 7 M model 3 µs, another binding costs 270 µs
SKIPPING_BUCKET = 128
"""For an attention that leaves out masked rows: 96 cost a step nothing measurable, a binding of 30
layers 440 µs.
"""
LANES = 16
"""Lanes in which sums over rows run (float32 in 512 bits; narrower vectors divide it)."""


class RowCache:
    """Keys and values of all layers as one array ``[2 * layers, capacity, kv_heads * head_dim]``.

    Keys of layer 0 come first, then its values, then layer 1. A prefix of one layer's rows is
    contiguous, so a target can read it in place, and one assignment commits the new rows of every
    layer. With 2 layers, 3 committed rows and a step that accepted 2 of its 4 new rows, ``commit(3,
    rows, 2)`` sets ``array[:, 3:5] = rows[:, :2]``. Raises InputError if there is not enough
    memory.
    """

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        shape = self.shape(geometry)
        try:
            # A masked row must not hold a NaN.
            self.array: NDArray[Any] = _zeros(shape, np.dtype(dtype))
        except (OSError, OverflowError, ValueError) as error:  # also beyond the address space
            raise InputError(
                f"no memory for a KV cache of {shape} {np.dtype(dtype).name}: {error}"
            ) from error
        self.capacity = geometry.capacity

    @staticmethod
    def shape(geometry: Geometry) -> tuple[int, int, int]:
        """Of the array: keys and values of each layer in turn, positions, elements of a row."""
        return 2 * geometry.layers, geometry.capacity, geometry.row_width

    def commit(self, length: int, rows: NDArray[Any], count: int) -> None:
        """Put the first ``count`` rows at ``length``.

        ``rows``: ``[2 * layers, n, kv_heads * head_dim]``.
        """
        self.array[:, length : length + count] = rows[:, :count]

    def visible(self, length: int, lanes: int = LANES) -> int:
        """How many rows to show a target that has ``length`` committed ones.

        The number is congruent to ``length`` modulo ``lanes``, and exceeds it by less than a bucket
        + ``lanes``, so there are ``lanes`` sizes per bucket. A call's new rows follow those shown.

        Congruence puts a new row into the lane that it will have once it is committed, so sums over
        rows add the same numbers in the same order whether a token was drafted or decoded plainly:
        along a chain of drafts all bits agree. Measured in int8 on long, undecided answers: without
        it 2 of 25 differ at near-ties (forced drafts: 5), with it none. An attention whose sums
        leave out masked rows needs one lane only.
        """
        bucket = BUCKET if lanes > 1 else SKIPPING_BUCKET
        shown = -(-max(length, 1) // bucket) * bucket
        shown += (length - shown) % lanes
        if shown > self.capacity:
            shown = self.capacity - (self.capacity - length) % lanes
        return shown

    def prefix(self, index: int, rows: int) -> NDArray[Any]:
        """A view ``[rows, kv_heads * head_dim]`` of the first rows of layer ``index // 2``.

        They are keys for an even ``index``, values for an odd one.
        """
        return self.array[index, :rows]


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros in small pages, which the system gives when they are first written.

    So a short conversation takes few.
    """
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
