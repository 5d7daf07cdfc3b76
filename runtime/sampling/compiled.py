"""The choice of a token by functions of the kernels' library (``native``), which agree with those in NumPy here.

Two scores or sums that are closer than 1e-12 could be told apart otherwise; nothing else could.
"""

from __future__ import annotations

from ctypes import c_double, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np

from ssdevice.runtime.sampling.noise import Scores
from ssdevice.runtime.sampling.options import Sampling


class Compiled:
    """The functions of a library for one answer. Rows of numbers are side by side in memory."""

    def __init__(self, library: Any, s: Sampling) -> None:
        self._choose, self._log_total = library.ssdevice_choose, library.ssdevice_log_total
        self._choose.argtypes = [c_void_p, c_int64, *4 * [c_double], c_int64, c_uint64, c_int64]
        self._log_total.argtypes, self._log_total.restype = [c_void_p, c_int64, c_void_p, c_int64], c_double
        whole = s.temperature, 1.0, 0.0, 1.0, 0, s.seed
        self._draws = whole, (s.temperature, s.top_p, s.min_p, s.typical_p, s.top_k, s.seed)

    def choose(self, scores: Scores, position: int, truncated: bool = True) -> int:
        """The token at a position from processed logits ``[V]``; negative if they have none, or are not numbers."""
        return int(self._choose(scores.ctypes.data, len(scores), *self._draws[truncated], position))

    def log_total(self, logits: Scores, count: int) -> tuple[float, list[int]]:
        """The logarithm of the sum of ``exp(logits [V])``, and the likeliest ``ids [count]``, ties to the lowest."""
        ids = np.zeros(count, np.int32)
        return self._log_total(logits.ctypes.data, len(logits), ids.ctypes.data, count), ids.tolist()
