"""A host chooses tokens with a Core ML package: a drafted token has the bits of a plainly decoded
one.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.config import Mode
from ssdevice.contract import (
    CHOOSING,
    DRAFT,
    FUNCTIONS,
    LOGITS,
    STATES,
    VERIFY,
    CacheForm,
    functions,
)
from ssdevice.export.mlprogram.options import KVWrite
from ssdevice.export.plan import Quant
from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package
from ssdevice.runtime.coreml.engine import CoreMLEngine, check_package
from ssdevice.runtime.sampling.options import Sampling
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.export.coreml.tiny import GEOMETRY, package
from tests.runtime.sampling.promise import SAMPLERS, check_forced_drafts

NAMES = {name: name for name in FUNCTIONS + CHOOSING}
QUICK = (Quant.FP16, Mode.SHARED, KVWrite.SLICE)
SLOW = ((Quant.INT8, Mode.LOSSLESS, KVWrite.SLICE), (Quant.INT4, Mode.SHARED, KVWrite.MASK))


@pytest.fixture(
    scope="module",
    params=[QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest) -> CoreMLEngine:
    quant, mode, write = request.param
    made = package(quant, mode, write=write, choosing=True)
    return CoreMLEngine(Program(Package.open(made)), GEOMETRY, NAMES)


@pytest.mark.parametrize("sampling", SAMPLERS[1:4], ids=range(1, 4))
def test_sampled_output_has_the_bits_of_plain_output(
    engine: CoreMLEngine, sampling: Sampling
) -> None:
    """Its schedule is fused, drafting in two calls is deferred; neither may change an answer."""
    assert check_forced_drafts(engine, sampling, seeds=2, exactly=True) == set(
        range(1, GEOMETRY.tree.emitted + 1)
    )


def test_a_step_in_two_calls_is_a_step(engine: CoreMLEngine) -> None:
    driver = OracleDriver(engine)
    facts = drive(
        driver, [7, 21, 3, 44, 9], perturb=False
    )  # drafts of the two schedules may differ at near-ties
    check(facts, driver, row_tolerance=2e-3)


def test_the_package_has_the_tensors_of_the_contract() -> None:
    opened = Package.open(package(choosing=True))
    check_package(opened, functions(GEOMETRY, CacheForm.INTERNAL, "float16"), NAMES)
    given = {tensor.name: tensor for tensor in opened.spec(VERIFY).outputs}
    assert given[LOGITS].dtype == given[STATES].dtype == "float32"
    assert {tensor.dtype for tensor in opened.spec(DRAFT).inputs} == {"int32", "float32"}


def test_rows_that_were_not_kept_are_written_over() -> None:
    """A verified tree is not committed: the next call at that length decodes as if it had never
    been.
    """
    engine = CoreMLEngine(Program(Package.open(package(choosing=True))), GEOMETRY, NAMES)
    found = []
    for looked in (False, True):
        conversation = engine.new_conversation()
        last = conversation.prefill([5, 6, 7])
        conversation.length = 3
        if looked:
            conversation.verify(last)
        found.append(conversation.verify_plain(last))
    np.testing.assert_array_equal(*found)
