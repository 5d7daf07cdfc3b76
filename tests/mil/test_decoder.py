"""A converted decoder, saved and opened again, against the torch module it came from, over chained steps."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")
pytest.importorskip("torch", reason="the decoder is a torch module")

import torch

from ssdevice.errors import InputError
from ssdevice.mil.program import Program, unsupported
from ssdevice.mil.reader import Package
from ssdevice.mil.registry import ExecutionError
from tests.mil import decoder
from tests.mil.conftest import Conversions
from tests.mil.decoder import CAPACITY, COMMITTED, EXPORT, MASK, ROWS, SLICE, TRACE, VOCAB, Decoder, steps

ROUTES = [(SLICE, TRACE), (SLICE, EXPORT), (MASK, EXPORT)]
Converted = tuple[Decoder, Package]


@pytest.fixture(scope="module", params=ROUTES, ids="-".join)
def converted(request: pytest.FixtureRequest, conversions: Conversions) -> Converted:
    write, route = request.param
    return Decoder(write, item=route == EXPORT), Package.open(conversions(write, route))


def by_torch(model: Decoder, tokens: np.ndarray, length: int) -> list[np.ndarray]:
    with torch.no_grad():
        return [out.numpy() for out in model(torch.tensor(tokens), torch.tensor([length], dtype=torch.int32))]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 4e-4), ("fp16", 4e-3)])
def test_chained_steps_equal_torch(converted: Converted, precision: str, tolerance: float) -> None:
    model, package = converted
    program, state = Program(package, precision), Program(package, precision).make_state()
    model.reset()
    for tokens, length in steps():
        result = program.run("main", {"tokens": tokens, "length": np.array([length], np.int32)}, state)
        chosen, logits, best = by_torch(model, tokens, length)
        np.testing.assert_allclose(result["logits"], logits, atol=tolerance)
        np.testing.assert_array_equal(result["chosen"], chosen)
        np.testing.assert_array_equal(result["best"], best)
    np.testing.assert_allclose(state.read("keys"), model.keys.numpy(), atol=4e-3)
    assert np.any(state.read("keys")[:, :, sum(COMMITTED) - 1])
    assert not np.any(state.read("keys")[:, :, sum(COMMITTED[:-1]) + ROWS :])


def test_the_package_describes_itself(converted: Converted) -> None:
    _, package = converted
    spec = package.spec("main")
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in spec.inputs} == {
        "tokens": ((1, ROWS), "int32"),
        "length": ((1,), "int32"),
    }
    assert [tensor.name for tensor in spec.outputs] == list(decoder.OUTPUTS)
    assert {(tensor.name, tensor.shape, tensor.dtype) for tensor in spec.states} == {
        ("keys", decoder.CACHE, "float16"),
        ("values", decoder.CACHE, "float16"),
    }
    assert unsupported(package) == []


def test_a_length_beyond_the_cache_is_not_clamped(converted: Converted) -> None:
    program = Program(converted[1])
    tokens = np.zeros((1, ROWS), np.int32)
    with pytest.raises(ExecutionError, match=r"function 'main', \w+ '.*'.*(index|slice)"):
        program.run("main", {"tokens": tokens, "length": np.array([CAPACITY - 1], np.int32)}, program.make_state())


@pytest.mark.parametrize("converted", [route for route in ROUTES if route[0] == SLICE], indirect=True, ids="-".join)
def test_a_reused_state_is_written_in_place(converted: Converted) -> None:
    program = Program(converted[1])
    state = program.make_state()
    buffer = state.arrays["keys"]
    program.run("main", {"tokens": steps()[0][0], "length": np.array([0], np.int32)}, state)
    assert np.shares_memory(buffer, state.arrays["keys"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((1, ROWS + 1), np.int32)}, r"'tokens' has shape \[1, 4\], expected \[1, 3\]"),
        ({"tokens": np.zeros((1, ROWS), np.float32)}, "do not fit int32"),
        ({"tokens": np.full((1, ROWS), 1 << 40)}, "do not fit int32"),
        ({"more": np.zeros(1)}, "takes length, tokens; given: length, more, tokens"),
    ],
)
def test_inputs_that_do_not_fit_are_named(converted: Converted, change: dict[str, np.ndarray], message: str) -> None:
    program = Program(converted[1])
    inputs = {"tokens": np.zeros((1, ROWS), np.int32), "length": np.zeros(1, np.int32)}
    with pytest.raises(InputError, match=message):
        program.run("main", {**inputs, **change}, program.make_state())


def test_a_stateful_function_needs_its_state(converted: Converted) -> None:
    inputs = {"tokens": np.zeros((1, ROWS), np.int32), "length": np.zeros(1, np.int32)}
    with pytest.raises(InputError, match="make_state"):
        Program(converted[1]).run("main", inputs)


def test_a_token_beyond_the_vocabulary_is_refused(converted: Converted) -> None:
    inputs = {"tokens": np.full((1, ROWS), VOCAB, np.int32), "length": np.zeros(1, np.int32)}
    program = Program(converted[1])
    with pytest.raises(ExecutionError, match="gather"):
        program.run("main", inputs, program.make_state())
