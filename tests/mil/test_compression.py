"""Compressed weights against coremltools' own decompression, and functions that share weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")
pytest.importorskip("torch", reason="the decoder is a torch module")

from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package
from tests.mil.conftest import Conversions
from tests.mil.decoder import SLICE, TRACE, steps


@pytest.fixture(scope="module")
def base(conversions: Conversions) -> Path:
    return conversions(SLICE, TRACE)


def compressed(path: Path, kind: str, folder: Path) -> Path:
    """The package with its weights in another form."""
    import coremltools as ct
    from coremltools.optimize import coreml as cto

    model = ct.models.MLModel(str(path), skip_model_load=True)
    if kind == "palette":
        config = cto.OptimizationConfig(cto.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=512))
        model = cto.palettize_weights(model, config)
    else:
        options = {
            "int8": {"dtype": "int8", "granularity": "per_channel"},
            "int4": {"dtype": "int4", "granularity": "per_block", "block_size": 32},
        }[kind]
        quantizer = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=512, **options)
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
    package = Package.open(path)
    program = Program(package)
    plan = program.plan("main")
    spec = ct.utils.load_spec(str(path))
    weights = path / "Data" / "com.apple.CoreML" / "weights"
    reference = load.load(spec, spec.specificationVersion, str(weights))
    checked = 0
    for operation in reference.functions["main"].operations:
        if operation.op_type.startswith("constexpr_"):
            expected = operation.materialized_val_inference()
            np.testing.assert_array_equal(plan.constants[operation.outputs[0].name], expected.astype(np.float32))
            checked += 1
    assert checked >= 8
    tokens, length = steps()[0]
    inputs = {"tokens": tokens, "length": np.array([length], np.int32)}
    result = program.run("main", inputs, program.make_state())["logits"].astype(np.float32)
    plain_program = Program(Package.open(base))
    plain = plain_program.run("main", inputs, plain_program.make_state())["logits"].astype(np.float32)
    assert 0 < np.abs(result - plain).max() < 0.6


def test_functions_of_one_package_share_weights_and_states(base: Path, tmp_path: Path) -> None:
    import coremltools as ct

    descriptor = ct.models.utils.MultiFunctionDescriptor()
    for name in ("first", "second"):
        descriptor.add_function(str(base), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = "second"
    path = tmp_path / "both.mlpackage"
    ct.models.utils.save_multifunction(descriptor, str(path))
    package = Package.open(path)
    assert set(package.functions) == {"first", "second"} and package.default_function == "second"
    program = Program(package)
    state, alone = program.make_state(), Program(Package.open(base))
    other = alone.make_state()
    for (tokens, length), function in zip(steps(), ("first", "second") * 3, strict=True):
        inputs = {"tokens": tokens, "length": np.array([length], np.int32)}
        together = program.run(function, inputs, state)
        np.testing.assert_array_equal(together["logits"], alone.run("main", inputs, other)["logits"])
    weights = [
        {id(value) for value in program.plan(name).constants.values() if value.nbytes > 4096}
        for name in package.functions
    ]
    assert weights[0] == weights[1] != set()
