"""Adapters in float16 and int8: what is stored comes back, as near as the form allows."""

from __future__ import annotations

import numpy as np
import pytest

from ssdevice.adapters.storage import SCALE, restored, stored
from ssdevice.bundle.manifest import Precision

RANDOM = np.random.default_rng(0)
TENSORS = {
    "up": RANDOM.standard_normal((16, 24)).astype(np.float32),
    "state.up": RANDOM.standard_normal((1, 16, 24)).astype(np.float32),
    "thin": RANDOM.standard_normal((4, 24)).astype(np.float32),
    "scale": RANDOM.standard_normal(24).astype(np.float32),
    "down": RANDOM.integers(-127, 128, (24, 16)).astype(np.int8),
    "ranks": np.array([4, 4], np.int64),
    "none": np.zeros((0, 24), np.float32),
}


@pytest.mark.parametrize(
    ("precision", "off"), [(Precision.FP32, 0.0), (Precision.FP16, 1e-3), (Precision.INT8, 0.02)]
)
def test_what_is_stored_comes_back(precision: Precision, off: float) -> None:
    found = restored(stored(TENSORS, precision))
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert np.abs(found[name].astype(np.float64) - value).max(initial=0) <= off * np.abs(
            value
        ).max(initial=0)


def test_int8_takes_a_byte_where_rows_pay_for_the_scales() -> None:
    found = stored(TENSORS, Precision.INT8)
    assert {name for name, value in found.items() if value.dtype == np.int8} == {
        "up",
        "state.up",
        "down",
    }
    assert found["state.up" + SCALE].shape == (1, 24)
    assert found["thin"].dtype == found["scale"].dtype == np.float16


@pytest.mark.parametrize(
    "tensors",
    [
        {"up" + SCALE: np.ones(3, np.float32)},
        {"up": np.ones((2, 3), np.int8), "up" + SCALE: np.ones(2, np.float32)},
        {"up": np.ones((2, 3), np.float32), "up" + SCALE: np.ones(3, np.float32)},
        {"up": np.ones(3, np.int8), "up" + SCALE: np.ones(3, np.float32)},
    ],
)
def test_a_scale_that_does_not_fit_is_refused(
    tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]],
) -> None:
    with pytest.raises(ValueError, match="scale"):
        restored(tensors)
