"""Saved Core ML packages, run operation by operation: what is in them and what they compute."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
torch = pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.config import Mode, Schedule  # noqa: E402
from ssdevice.contract import KEYS, VALUES, CacheForm, functions  # noqa: E402
from ssdevice.errors import BundleError  # noqa: E402
from ssdevice.export.coreml.apps import PROGRAM, compact  # noqa: E402
from ssdevice.export.coreml.exporter import CACHE_DTYPE  # noqa: E402
from ssdevice.export.driver import EngineDriver  # noqa: E402
from ssdevice.export.mlprogram.options import KVWrite  # noqa: E402
from ssdevice.export.mlprogram.stored import stored_weights  # noqa: E402
from ssdevice.export.plan import Quant  # noqa: E402
from ssdevice.mil.program import Program, State  # noqa: E402
from ssdevice.mil.reader import Package  # noqa: E402
from ssdevice.runtime.coreml.engine import CoreMLCache, CoreMLEngine, check_package  # noqa: E402
from tests.conformance.engine_driver import OracleDriver  # noqa: E402
from tests.conformance.oracle import check, drive  # noqa: E402
from tests.export.coreml.tiny import FUNCTIONS, GEOMETRY, STEP, TREE, model, package, part  # noqa: E402
from tests.model.torch_driver import TorchDriver  # noqa: E402

PROMPT = [5, 61, 17, 33, 80, 2, 44]
SAME = {name: name for name in FUNCTIONS}
QUANTS = [Quant.FP16, Quant.INT8, Quant.INT4, Quant.PALETTE4]
FAST = {(Quant.FP16, Mode.SHARED, Schedule.FUSED), (Quant.INT4, Mode.SHARED, Schedule.FUSED)}
MATRIX = [
    pytest.param(*case, id="-".join(case), marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(QUANTS, Mode, Schedule)
]


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def engine_of(path: Path, precision: str = "fp16") -> CoreMLEngine:
    return CoreMLEngine(Program(Package.open(path), precision), GEOMETRY, SAME)


def program_of(driver: EngineDriver) -> Program:
    assert isinstance(driver.engine, CoreMLEngine) and isinstance(driver.engine.program, Program)
    return driver.engine.program


def state_of(driver: EngineDriver) -> State:
    assert isinstance(driver.conversation.cache, CoreMLCache)
    return driver.conversation.cache.state


def oracle_driver(path: Path, precision: str) -> OracleDriver:
    """A driver whose state starts full of garbage."""
    driver = OracleDriver(engine_of(path, precision))
    draw = np.random.default_rng(9)
    for name in (KEYS, VALUES):
        garbage = 3 * draw.standard_normal(state_of(driver.inner)[name].shape)
        state_of(driver.inner)[name] = garbage.astype(np.float16).astype(np.float32)
    return driver


def test_tensors_are_the_contract():
    opened = Package.open(package())
    expected = functions(GEOMETRY, CacheForm.INTERNAL, CACHE_DTYPE)
    assert set(opened.functions) == set(FUNCTIONS)
    for name in FUNCTIONS:
        found = opened.spec(name)
        assert set(found.inputs) == set(expected[name].inputs)
        assert found.outputs == expected[name].outputs
        assert set(found.states) == set(expected[name].states)


CONTRACT = functions(GEOMETRY, CacheForm.INTERNAL, CACHE_DTYPE)


def test_the_engine_takes_what_the_manifest_describes():
    check_package(Package.open(package()), CONTRACT, SAME)


def test_another_function_under_a_name_is_refused():
    with pytest.raises(BundleError, match="function 'prefill' .*do not belong together"):
        check_package(Package.open(package()), CONTRACT, SAME | {STEP: "prefill"})
    with pytest.raises(BundleError, match="has no function 'stride'; it has"):
        check_package(Package.open(package()), CONTRACT, SAME | {STEP: "stride"})


def test_a_state_of_another_size_is_refused():
    wider = functions(
        replace(GEOMETRY, context=GEOMETRY.context + 32), CacheForm.INTERNAL, CACHE_DTYPE
    )
    with pytest.raises(BundleError, match="state 'keys'"):
        check_package(Package.open(package()), wider, SAME)


def test_a_deployment_target_without_states_is_refused(tmp_path: Path):
    from coremltools.proto import Model_pb2

    old = shutil.copytree(package(), tmp_path / "old.mlpackage")
    file = old / PROGRAM
    model = Model_pb2.Model.FromString(file.read_bytes())
    model.specificationVersion = 8
    file.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="deployment target is too old.*version 8"):
        check_package(Package.open(old), CONTRACT, SAME)


@pytest.mark.parametrize(
    "quant",
    [Quant.FP16, pytest.param(Quant.INT4, marks=pytest.mark.wide)],
    ids=lambda quant: quant.value,
)
def test_a_compact_program_is_small_and_computes_the_same(quant: Quant, tmp_path: Path):
    small = shutil.copytree(package(quant), tmp_path / "small.mlpackage")
    sizes = compact(small)
    assert set(sizes) == set(FUNCTIONS)
    assert (small / PROGRAM).stat().st_size < 0.6 * (package(quant) / PROGRAM).stat().st_size
    whole, less = (EngineDriver(engine_of(path)) for path in (package(quant), small))
    assert whole.prefill(PROMPT[:5], 0) == less.prefill(PROMPT[:5], 0)
    for length in range(5, 12):
        assert whole.step(length, [[1, 2], [3, 4]], length) == less.step(
            length, [[1, 2], [3, 4]], length
        )
    assert np.array_equal(state_of(whole)[KEYS], state_of(less)[KEYS])
    with stored_weights(model(), program_of(less), FUNCTIONS):
        pass  # every matrix is found under its short name


def test_the_state_is_cut_in_multiples_of_32():
    assert GEOMETRY.capacity % 32 == 0
    for state in Package.open(package()).spec(STEP).states:
        assert state.shape == (
            GEOMETRY.layers,
            GEOMETRY.kv_heads,
            GEOMETRY.capacity,
            GEOMETRY.head_dim,
        )
        assert state.dtype == "float16"


@pytest.mark.parametrize(
    "write",
    [KVWrite.SLICE, pytest.param(KVWrite.MASK, marks=pytest.mark.slow)],
    ids=lambda write: write.value,
)
def test_rows_go_where_the_length_says(write: KVWrite):
    driver = EngineDriver(engine_of(package(write=write)))
    before = {name: state_of(driver)[name] for name in (KEYS, VALUES)}
    for length in (3, 11, GEOMETRY.context - 1):
        driver.plain(7, length)
        for name in (KEYS, VALUES):
            now = state_of(driver)[name]
            changed = np.flatnonzero((now != before[name]).any(axis=(0, 1, 3)))
            assert changed.tolist() == [length]
            before[name] = now


def test_a_step_writes_its_rows_and_no_others():
    driver = EngineDriver(engine_of(package()))
    driver.prefill(PROMPT[:5], 0)
    before = state_of(driver)[KEYS]
    driver.step(3, [[1, 2], [3, 4]], 5)
    changed = np.flatnonzero((state_of(driver)[KEYS] != before).any(axis=(0, 1, 3)))
    assert changed.tolist() == list(range(5, 5 + TREE.emitted))


def test_state_persists_and_is_shared_by_the_functions():
    torch_driver = TorchDriver(
        model(), TREE, TREE.width, Schedule.FUSED, GEOMETRY.context, GEOMETRY.chunk
    )
    driver = EngineDriver(engine_of(package(), precision="fp32"))
    with stored_weights(model(), program_of(driver), FUNCTIONS):
        for at in (0, 5):
            mine = driver.prefill(PROMPT[at : at + 5], at)
            theirs = torch_driver.prefill(PROMPT[at : at + 5], at)
            assert mine == theirs
        root = mine[0]
        length = len(PROMPT)
        for _ in range(6):
            following = driver.plain(root, length)
            assert following == torch_driver.plain(root, length)
            root, length = following, length + 1
        rows = torch_driver.rows(0, length)[:, :, 0].transpose(0, 1, 3, 2, 4)
        expected = rows.reshape(2 * GEOMETRY.layers, length, -1)
        # Norms, tables and biases are stored in float16.
        assert np.abs(driver.rows(0, length) - expected).max() < 0.05


@pytest.mark.parametrize(
    "quant",
    [Quant.FP16, pytest.param(Quant.INT4, marks=pytest.mark.wide)],
    ids=lambda quant: quant.value,
)
def test_functions_share_their_weights(quant: Quant):
    weights = {name: part(name, quant) / "Data/com.apple.CoreML/weights" for name in FUNCTIONS}
    merged = size(package(quant) / "Data/com.apple.CoreML/weights")
    largest = max(size(path) for path in weights.values())
    assert merged < 1.2 * largest
    assert merged < 0.6 * sum(size(path) for path in weights.values())


@pytest.mark.parametrize(
    ("quant", "per_channel", "expected"),
    [
        (Quant.INT4, False, {"constexpr_blockwise_shift_scale"}),
        pytest.param(
            Quant.INT8, False, {"constexpr_blockwise_shift_scale"}, marks=pytest.mark.slow
        ),
        pytest.param(Quant.INT4, True, {"constexpr_blockwise_shift_scale"}, marks=pytest.mark.slow),
        pytest.param(
            Quant.PALETTE4,
            False,
            {"constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_matrix_is_compressed_and_tables_are_not(
    quant: Quant, per_channel: bool, expected: set[str]
):
    opened = Package.open(package(quant, per_channel=per_channel))
    for function in opened.functions.values():
        kinds = function.makers
        weights = {
            argument
            for operation in function.operations
            if operation.kind == "linear"
            for argument in operation.inputs["weight"]
        }
        assert {kinds[str(name)] for name in weights} <= expected
        tables = [kind for name, kind in kinds.items() if "rope_" in name and "weight" not in name]
        assert tables
        assert not any(kind.startswith("constexpr_") for kind in tables)


def test_what_cannot_be_said_in_float16_is_not_in_the_program():
    for function in Package.open(package()).functions.values():
        for name, value in function.constants.items():
            if isinstance(value.data, np.ndarray) and value.data.dtype.kind == "f":
                assert np.isfinite(value.data).all(), name


# Sums in the interpreter do not depend on the order of their terms, so not a bit may differ.
@pytest.mark.parametrize(("quant", "mode", "schedule"), MATRIX)
def test_speculative_decoding_is_plain_decoding(quant: Quant, mode: Mode, schedule: Schedule):
    driver = oracle_driver(package(quant, mode, schedule), precision="fp32")
    check(drive(driver, PROMPT), driver, row_tolerance=0.0, perturbation_tolerance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(Schedule))
def test_writing_by_mask_is_the_same(schedule: Schedule):
    driver = oracle_driver(package(schedule=schedule, write=KVWrite.MASK), precision="fp32")
    check(drive(driver, PROMPT), driver, row_tolerance=0.0, perturbation_tolerance=0.0)


@pytest.mark.parametrize(
    "quant", [Quant.FP16, pytest.param(Quant.INT8, marks=pytest.mark.slow)], ids=str
)
def test_half_precision_does_not_change_the_tokens(quant: Quant):
    driver = oracle_driver(package(quant), precision="fp16")
    check(drive(driver, PROMPT), driver, row_tolerance=0.0, perturbation_tolerance=0.0)
