"""Compressed weights against coremltools' own decompression, and functions that share weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")
pytest.importorskip("torch", reason="the step is a torch module")

from ssdevice.config import Mode, Schedule
from ssdevice.contract import DRAFTS, FUNCTIONS, LENGTH, ROOT
from ssdevice.export.coreml.exporter import save
from ssdevice.export.coreml.logits import logits_of
from ssdevice.export.mlprogram.options import KVWrite
from ssdevice.export.mlprogram.program import MAIN
from ssdevice.export.plan import Quant
from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package
from tests.export.coreml.tiny import GEOMETRY, PLAIN, STEP, package, part, program
from tests.once import made_once


def step() -> Path:
    """A package with a step as its only function; coremltools compresses no others."""

    def make(out: Path) -> None:
        save(
            {MAIN: program(STEP, Quant.FP16, Mode.SHARED, Schedule.FUSED, KVWrite.SLICE, False)},
            out,
            MAIN,
        )

    return made_once("mil/step.mlpackage", make)


@pytest.fixture(scope="module")
def base() -> Path:
    return step()


def compressed(path: Path, kind: str, folder: Path) -> Path:
    """The package with its weights in another form."""
    import coremltools as ct
    from coremltools.optimize import coreml as cto

    model = ct.models.MLModel(str(path), skip_model_load=True)
    if kind == "palette":
        config = cto.OptimizationConfig(
            cto.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=512)
        )
        model = cto.palettize_weights(model, config)
    else:
        options = {
            "int8": {"dtype": "int8", "granularity": "per_channel"},
            "int4": {"dtype": "int4", "granularity": "per_block", "block_size": 32},
        }[kind]
        quantizer = cto.OpLinearQuantizerConfig(
            mode="linear_symmetric", weight_threshold=512, **options
        )
        model = cto.linear_quantize_weights(model, cto.OptimizationConfig(quantizer))
    target = folder / f"{kind}.mlpackage"
    model.save(str(target))
    return target


@pytest.mark.parametrize("kind", ["int8", "int4", "palette"])
def test_compressed_weights_equal_coremltools(base: Path, kind: str, tmp_path: Path) -> None:
    """Materialized weights, bit for bit; then a step runs and stays near the uncompressed one."""
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto import load

    path = compressed(base, kind, tmp_path)
    opened = Package.open(path)
    made = Program(opened)
    plan = made.plan(MAIN)
    spec = ct.utils.load_spec(str(path))
    weights = path / "Data" / "com.apple.CoreML" / "weights"
    reference = load.load(spec, spec.specificationVersion, str(weights))
    checked = 0
    for operation in reference.functions[MAIN].operations:
        if operation.op_type.startswith("constexpr_"):
            expected = operation.materialized_val_inference()
            np.testing.assert_array_equal(
                plan.constants[operation.outputs[0].name], expected.astype(np.float32)
            )
            checked += 1
    assert checked >= 8
    kept = made._shared.values()
    assert all(
        array.dtype == np.float32 for array in kept if array.size > 1024
    )  # not the codes beside it
    logits = logits_of(opened.function(MAIN))
    found, plain = (_values(one, logits) for one in (made, Program(Package.open(base))))
    assert 0 < np.abs(found - plain).max() < np.abs(plain).max()


def _values(made: Program, name: str) -> np.ndarray:
    """A value of the first call of a step."""
    seen: list[np.ndarray] = []
    drafts = np.ones((GEOMETRY.gamma, GEOMETRY.k), np.int32)
    made.run(
        MAIN,
        {ROOT: np.array([7], np.int32), DRAFTS: drafts, LENGTH: np.array([0], np.int32)},
        made.make_state(),
        lambda operation, outputs: seen.extend(outputs if operation.output == name else ()),
    )
    return seen[0]


def test_functions_of_one_package_share_weights_and_states() -> None:
    made = Program(Package.open(package()))
    alone = Program(Package.open(part(PLAIN, Quant.FP16)))
    state = made.make_state()
    other = alone.make_state()
    assert state.keys() == other.keys()
    for length in range(3):
        inputs = {ROOT: np.array([7 + length], np.int32), LENGTH: np.array([length], np.int32)}
        together = made.run(PLAIN, inputs, state)
        apart = alone.run(PLAIN, inputs, other)
        assert all(np.array_equal(together[name], apart[name]) for name in apart)
    weights = []
    for name in FUNCTIONS:
        constants = made.plan(name).constants.values()
        weights.append({id(value) for value in constants if value.nbytes > 4096})
    assert weights[0] & weights[1] & weights[2]
