"""Speculative output is plain output on ExecuTorch, for every way a step can end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("executorch")

from ssdevice.config import Mode, Schedule
from ssdevice.export.plan import Quant
from ssdevice.runtime.engine import Engine, EngineOptions, open_engine
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.export.executorch import programs

PROMPT = [7, 21, 3, 44, 9, 30, 12]
QUICK = (Quant.FP32, Mode.SHARED, Schedule.DEFERRED)


@pytest.mark.parametrize(
    "combination",
    [
        combination if combination == QUICK else pytest.param(combination, marks=pytest.mark.slow)
        for combination in itertools.product(
            (Quant.FP32, Quant.INT8, Quant.INT4), (Mode.SHARED, Mode.LOSSLESS), (Schedule.DEFERRED, Schedule.FUSED)
        )
    ],
    ids="-".join,
)
def test_speculative_output_is_plain_output(combination: tuple[Quant, Mode, Schedule]) -> None:
    bundle = programs.bundle(*combination)
    conform(open_engine(bundle, None, EngineOptions()))
    assert bundle.manifest.parity["counts"] == bundle.geometry.tree.emitted
    assert bundle.manifest.parity["products"] > 100


@pytest.mark.lowering
def test_speculative_output_of_an_app_in_slots_is_plain_output() -> None:
    """In INT8, which makes levels of what FP32 would hide in its last bit."""
    conform(open_engine(programs.slots(), "one", EngineOptions()))


def conform(engine: Engine) -> None:
    driver = OracleDriver(engine)
    facts = drive(driver, PROMPT, seed=1)
    assert np.isfinite(driver.rows(0, driver.context)).all()
    # Every row stands in the column of its position, so plain decoding adds the same numbers in the same order;
    # rejected rows share no scale with others. Neither changes a bit.
    check(facts, driver, 0.0, perturbation_tolerance=0.0)
    engine.close()
