"""Rounding to float16 is NumPy's, whatever the number of elements."""

from __future__ import annotations

import numpy as np
import pytest

from ssdevice.mil.dtypes import BY_NAME
from ssdevice.mil.finish import MANY, check_type, round_half
from ssdevice.mil.registry import ExecutionError
from ssdevice.mil.schema import TensorType

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
FINITE = np.unique(HALVES[np.isfinite(HALVES)])


def check(values: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(round_half(values), expected)
        np.testing.assert_array_equal(round_half(values[: MANY // 2]), expected[: MANY // 2])


def test_every_float16_stays() -> None:
    check(HALVES)
    np.testing.assert_array_equal(round_half(FINITE), FINITE)


def test_midpoints_go_to_even_and_their_neighbours_to_the_nearest() -> None:
    midpoints = ((FINITE[1:].astype(np.float64) + FINITE[:-1]) / 2).astype(np.float32)
    for values in (
        midpoints,
        np.nextafter(midpoints, np.float32(np.inf)),
        np.nextafter(midpoints, np.float32(-np.inf)),
    ):
        check(values)


def test_any_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    check(bits.view(np.float32))
    tame = bits.view(np.float32)
    check(tame[np.abs(tame) < 60000])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 65519.99, 65520, -65520, 1e38, -3e38, 1e-40, -0.0])
def test_one_special_value_among_many(value: float) -> None:
    values = np.linspace(-1, 1, MANY + 5, dtype=np.float32)
    values[3] = value
    check(values)


def test_a_strided_array() -> None:
    values = np.random.default_rng(1).standard_normal((80, 90)).astype(np.float32)
    check(values.T[1::2])


def test_a_result_of_another_shape_or_type_is_refused() -> None:
    kind = TensorType(BY_NAME["float16"], (2, None))
    check_type(np.zeros((2, 7), np.float32), kind, "here")
    with pytest.raises(ExecutionError, match=r"shape \[3, 7\], the program declares \[2, None\]"):
        check_type(np.zeros((3, 7), np.float32), kind, "here")
    with pytest.raises(ExecutionError, match="its result is int32, declared float16"):
        check_type(np.zeros((2, 7), np.int32), kind, "here")
