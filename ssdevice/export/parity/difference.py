"""How far the numbers of an artifact are from those of the reference."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ENOUGH_ROWS = 8
"""Columns are checked one by one if a product has at least so many rows."""


def as_stored(rows: Array, dtype: np.dtype[Any] | type[np.generic]) -> Array:
    """Rows ``[.., K]``, in float32, as a cache of this type holds them."""
    return rows.astype(dtype).astype(np.float32)


def difference(mine: Array, theirs: Array) -> float:
    """The largest relative difference (rms) of corresponding rows, ``[rows, K]`` each."""
    size = np.sqrt(np.square(theirs).mean(axis=-1)) + 1e-12
    far = np.sqrt(np.square(mine - theirs).mean(axis=-1)) / size
    return float(np.nan_to_num(far, nan=np.inf).max(initial=0.0))


def stored_difference(mine: Array, exact: Array) -> float:
    """``difference`` of a cache's rows ``[rows, K]`` from exact ones, not counting the rounding to
    the cache's type.

    An outlier at a rounding edge may be most of its row, and goes either way.
    """
    stored = as_stored(exact, mine.dtype)
    held = mine.astype(np.float32)
    return min(
        difference(held, stored), max(0.0, difference(held, exact) - difference(stored, exact))
    )


def product_difference(mine: Array, theirs: Array) -> float:
    """The relative difference (rms) of two products ``[rows, N]``; all rows count the same."""
    scale = np.sqrt(np.square(theirs).mean(axis=-1, keepdims=True)) + 1e-12
    far = np.sqrt(np.square((mine - theirs) / scale).mean())
    return float(np.nan_to_num(far, nan=np.inf))


def distinct(rows: Array) -> list[int]:
    """The places of distinct ``rows [n, K]``: equal ones, such as those of a prompt's padding, are
    one sample.
    """
    return list({row.tobytes(): at for at, row in enumerate(rows)}.values())


def worst_column(mine: Array, theirs: Array, explained: Array | float = 0.0) -> tuple[int, float]:
    """The column with the largest median difference, relative to the column's median size, and that
    ratio.

    0 if there are few rows. A column's size counts as at least a third of the usual one.
    ``explained [rows]``: what rounding explains of each difference in a row.
    """
    if len(mine) < ENOUGH_ROWS:
        return 0, 0.0
    scale = np.sqrt(np.square(theirs).mean(axis=-1, keepdims=True)) + 1e-12
    unexplained = np.maximum(np.abs(mine - theirs) - np.reshape(explained, (-1, 1)), 0)
    far = np.median(unexplained / scale, axis=0)
    off = np.nan_to_num(
        far / np.maximum(np.median(np.abs(theirs) / scale, axis=0), 0.3), nan=np.inf
    )
    return int(off.argmax()), float(off.max())
