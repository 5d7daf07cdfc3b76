"""Intervals and spreads: checked against what is known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdevice.bench import statistics
from ssdevice.bench.statistics import Interval, Spread, mean_interval, speedup, spread
from ssdevice.errors import InputError


def test_interval_of_a_mean_is_that_of_its_normal_approximation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(1).normal(5, 2, size=400)
    interval = mean_interval(values)
    half = 1.96 * values.std() / 20
    assert interval.estimate == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.02)
    monkeypatch.setattr(statistics, "CONFIDENCE", 0.99)
    wider = mean_interval(values)
    assert wider.low is not None and interval.low is not None and wider.low < interval.low


def test_speedup_is_a_ratio_of_sums() -> None:
    interval = speedup([2.0, 30.0], [1.0, 10.0])
    assert interval.estimate == pytest.approx(32 / 11)
    assert (interval.low, interval.high) == (pytest.approx(2), pytest.approx(3))
    assert speedup([4.0] * 5, [2.0] * 5) == Interval(2, 2, 2, 0.95)


def test_same_values_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).random(50)
    monkeypatch.setattr(statistics, "SAMPLES", 100)
    expected = mean_interval(values)
    assert mean_interval(values) == expected
    monkeypatch.setattr(
        statistics, "DRAWN_AT_ONCE", 120
    )  # drawing in small portions changes nothing
    assert mean_interval(values) == expected
    monkeypatch.setattr(statistics, "SEED", 8)
    assert mean_interval(values) != expected


def test_one_example_has_no_bounds() -> None:
    interval = mean_interval([2])
    assert interval == Interval(2, None, None, 0.95)


@settings(max_examples=25)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_bounds_hold_the_estimate_and_stay_in_the_range_of_the_values(values: list[float]) -> None:
    with pytest.MonkeyPatch.context() as few:
        few.setattr(statistics, "SAMPLES", 200)
        interval = mean_interval(values)
    assert interval.low is not None and interval.high is not None
    slack = 1e-9 * max(1, *map(abs, values))
    assert min(values) - slack <= interval.low <= interval.high <= max(values) + slack


def test_spread_of_rounds() -> None:
    assert spread([5, 1, 2, 4, 3]) == Spread(median=3, q1=2, q3=4, low=1, high=5)
    assert spread([7]) == Spread(7, 7, 7, 7, 7)


def test_wrong_input_is_named() -> None:
    with pytest.raises(
        InputError, match=r"values: expected a vector of one value or more, found shape \[0\]"
    ):
        spread([])
    with pytest.raises(InputError, match="paired samples have 2 and 1 values"):
        speedup([1, 2], [1])
    with pytest.raises(InputError, match="the second sample: holds a value that is not finite"):
        speedup([1.0], [float("nan")])
    with pytest.raises(InputError, match="times above 0"):
        speedup([1.0, 2.0], [0.0, 1.0])
