"""An exported step, opened again: chained calls against the torch module it came from, and calls
that do not fit.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")
torch = pytest.importorskip("torch", reason="the step is a torch module")

from ssdevice.config import Schedule  # noqa: E402
from ssdevice.contract import COUNT, DRAFTS, KEYS, LENGTH, ROOT, TOKENS, VALUES  # noqa: E402
from ssdevice.errors import InputError  # noqa: E402
from ssdevice.export.coreml.exporter import convert, save  # noqa: E402
from ssdevice.export.mlprogram.options import CoreMLOptions, KVWrite  # noqa: E402
from ssdevice.mil.operations import ExecutionError  # noqa: E402
from ssdevice.mil.program import Program  # noqa: E402
from ssdevice.mil.reader import Package  # noqa: E402
from tests.export.coreml.tiny import GEOMETRY, STEP, TREE, model, package  # noqa: E402
from tests.model.tiny import VOCAB  # noqa: E402
from tests.model.torch_driver import TorchDriver  # noqa: E402

SHAPES = {ROOT: (1,), DRAFTS: (GEOMETRY.gamma, GEOMETRY.k), LENGTH: (1,)}
ZEROS = {name: np.zeros(shape, np.int32) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(Package.open(package()))


@pytest.fixture(scope="module", params=list(KVWrite), ids=lambda write: write.value)
def half(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TorchDriver, Package]:
    """The step of a model whose numbers float16 holds, so that a package has the same."""
    module = copy.deepcopy(model())
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            if value.is_floating_point():
                value.copy_(value.half().float())
    path = tmp_path_factory.mktemp("half") / "step.mlpackage"
    save(
        {
            STEP: convert(
                STEP, module, GEOMETRY, Schedule.FUSED, CoreMLOptions(kv_write=request.param)
            )
        },
        path,
        STEP,
    )
    driver = TorchDriver(module, TREE, TREE.width, Schedule.FUSED, GEOMETRY.context, GEOMETRY.chunk)
    return driver, Package.open(path)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp16", 1e-2)])
def test_chained_steps_equal_torch(
    half: tuple[TorchDriver, Package], precision: str, tolerance: float
) -> None:
    reference, opened = half
    program = Program(opened, precision)
    state = program.make_state()
    reference.cache.zero_()
    length = 0
    root = 3
    for i in range(6):
        drafts = [[1 + i, 2], [3, 4 + i]]
        inputs = {ROOT: [root], DRAFTS: drafts, LENGTH: [length]}
        out = program.run(
            STEP, {name: np.array(value, np.int32) for name, value in inputs.items()}, state
        )
        expected = reference.step(root, drafts, length)
        assert out[TOKENS][: int(out[COUNT][0])].tolist() == expected.tokens[: expected.count]
        length, root = length + expected.count, expected.tokens[expected.count - 1]
    for part, name in enumerate((KEYS, VALUES)):
        theirs = reference.cache[:, part, 0, :, :length].numpy()
        assert np.abs(state[name][:, :, :length] - theirs).max() <= tolerance * np.abs(theirs).max()


def test_a_length_beyond_the_cache_is_not_clamped(program: Program) -> None:
    for length in (GEOMETRY.capacity - 1, -1):
        inputs = {**ZEROS, LENGTH: np.array([length], np.int32)}
        with pytest.raises(ExecutionError, match=r"function 'step', \w+ '.*'.*(index|slice)"):
            program.run(STEP, inputs, program.make_state())


@pytest.mark.parametrize("value", [np.full(1, 0.5, np.float32), np.full(1, 1 << 40)])
def test_values_that_do_not_fit_are_refused(program: Program, value: np.ndarray) -> None:
    with pytest.raises(InputError, match="do not fit int32"):
        program.run(STEP, {**ZEROS, ROOT: value}, program.make_state())


def test_a_token_beyond_the_vocabulary_is_refused(program: Program) -> None:
    with pytest.raises(ExecutionError, match="gather"):
        program.run(STEP, {**ZEROS, ROOT: np.array([VOCAB], np.int32)}, program.make_state())
