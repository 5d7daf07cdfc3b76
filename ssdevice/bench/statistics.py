"""Uncertainty of a measurement: paired bootstrap intervals, and the spread of repeated rounds.

Intervals are percentiles over examples drawn with replacement, both values of an example together.
The same values give the same interval.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ssdevice.errors import InputError

CONFIDENCE = 0.95
SAMPLES = 10_000
SEED = 0
DRAWN_AT_ONCE = 1 << 20
"""Numbers drawn at once, which limits memory to some tens of MB."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its interval; they are None with fewer than two examples."""

    estimate: float
    low: float | None
    high: float | None
    confidence: float = CONFIDENCE


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of repeated rounds."""

    median: float
    q1: float
    q3: float
    low: float
    high: float


def spread(values: ArrayLike) -> Spread:
    """The spread of one or more values; quartiles are interpolated linearly. Raises InputError."""
    data = _values(values, "values")
    return Spread(
        median=float(np.quantile(data, 0.5)),
        q1=float(np.quantile(data, 0.25)),
        q3=float(np.quantile(data, 0.75)),
        low=float(np.quantile(data, 0.0)),
        high=float(np.quantile(data, 1.0)),
    )


def mean_interval(values: ArrayLike) -> Interval:
    """The mean of values ``[n]`` and its bootstrap interval.

    Raises InputError for no values or non-finite ones.
    """
    return _bootstrap(_values(values, "values")[:, None], lambda means: means[:, 0])


def speedup(baseline_seconds: ArrayLike, seconds: ArrayLike) -> Interval:
    """Time of the baseline over time of the other, each summed over paired examples ``[n]``.

    They may be rounds as well. As a ratio of sums it weighs answers by their time; 2 means half the
    time. Raises InputError unless both have the same number (1 or more) of times above 0.
    """
    a = _values(baseline_seconds, "the first sample")
    b = _values(seconds, "the second sample")
    if len(a) != len(b):
        raise InputError(f"paired samples have {len(a)} and {len(b)} values")
    if (a <= 0).any() or (b <= 0).any():
        raise InputError("a speed-up needs times above 0 seconds")
    return _bootstrap(np.stack((a, b), axis=1), lambda means: means[:, 0] / means[:, 1])


def _bootstrap(rows: Floats, statistic: Callable[[Floats], Floats]) -> Interval:
    """The interval over rows ``[n, columns]`` of a statistic of means, ``[m, columns] -> [m]``."""
    estimate = float(statistic(rows.mean(axis=0, keepdims=True))[0])
    count = len(rows)
    if count < 2:
        return Interval(estimate, None, None)
    rng = np.random.default_rng(SEED)
    at_once = max(1, DRAWN_AT_ONCE // count)
    drawn = []
    for start in range(0, SAMPLES, at_once):
        picks = rng.integers(0, count, size=(min(at_once, SAMPLES - start), count))
        drawn.append(statistic(rows[picks].mean(axis=1)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(drawn), (tail, 1 - tail))
    return Interval(estimate, float(low), float(high))


def _values(values: ArrayLike, what: str) -> Floats:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0:
        raise InputError(
            f"{what}: expected a vector of one value or more, found shape {list(data.shape)}"
        )
    if not np.isfinite(data).all():
        raise InputError(f"{what}: holds a value that is not finite")
    return data
