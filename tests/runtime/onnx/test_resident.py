"""Resident memory, predicted: each term follows from a bundle's files, and their sum is what a process has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ssdevice.bench.memory import measure_memory
from ssdevice.contract import FUNCTIONS, PLAIN, PREFILL
from ssdevice.errors import BundleError
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.onnx.resident import predict, read_weights, resident
from ssdevice.runtime.resident import Resident
from ssdevice.runtime.target import runtime_target
from tests.runtime import tiny_bundle as tiny

PLAINLY = (PREFILL, PLAIN)


def predicted(precision: str, ours: bool, functions: tuple[str, ...] = FUNCTIONS, tokens: int = 40) -> Resident:
    return resident(tiny.tiny_bundle(precision), None, functions, tokens, ours)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_weights_are_those_that_onnx_reads(precision: str) -> None:
    import onnx

    file = tiny.tiny_bundle(precision).file(PREFILL)
    model = onnx.load(str(file), load_external_data=False)
    graph = model.graph
    stored = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
    assert [weight.size for weight in read_weights(file)] == [int(where["length"]) for where in stored if where]
    nodes = [*graph.node, *(node for function in model.functions for node in function.node)]
    used = {(node.op_type, index) for node in nodes for index, _ in enumerate(node.input)}
    assert all(weight.readers <= used for weight in read_weights(file))


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(b"\x3a\xff\xff\xff")
    with pytest.raises(BundleError, match="graph.onnx: not an ONNX graph"):
        read_weights(tmp_path / "graph.onnx")


def quantized_graph(file: Path) -> Path:
    """A graph of an embedding that is also the head, 64 codes by 1000 tokens, and of an INT4 linear."""
    from onnx import TensorProto, helper

    sizes = {"head": 64_000, "head.scales": 4000, "codes": 32_000, "scales": 8000}
    constants = []
    for at, (name, size) in enumerate(sizes.items()):
        tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[size], data_location=TensorProto.EXTERNAL)
        for key, value in {"location": "weights.bin", "offset": str(at * 65_536), "length": str(size)}.items():
            tensor.external_data.add(key=key, value=value)
        constants.append(tensor)
    nodes = [
        helper.make_node("Int8Embedding", ["ids", "head", "head.scales"], ["x"], domain="ssdevice"),
        helper.make_node("Int4Linear", ["x", "codes", "scales"], ["y"], domain="ssdevice"),
        helper.make_node("Int8Linear", ["y", "head", "head.scales", "zero"], ["logits"], domain="ssdevice"),
    ]
    model = helper.make_model(helper.make_graph(nodes, "step", [], [], constants))
    file.write_bytes(model.SerializeToString())
    return file


def test_kernels_hold_weights_once_and_onnx_runtime_once_for_each_graph(tmp_path: Path) -> None:
    bundle, file = tiny.tiny_bundle("fp32"), quantized_graph(tmp_path / "step.onnx")
    files = {"prefill": file, "step": file}
    ours, without = (predict(bundle, files, bundle.geometry, 500, 40, own) for own in (True, False))
    assert ours.weights == 500 + 108_000 - 4000 and ours.mapped == 0  # scales in two bytes each
    assert ours.opening - (ours.total - ours.mapped - ours.cache - ours.work) == 108_000 + 64_000
    # MatMulNBits keeps scales twice; the columns of a head that is gathered lie in all its pages.
    assert without.weights == 500 + 2 * (108_000 + 8000) and without.mapped == 2 * 68_000


def test_products_in_float_are_packed_for_each_graph_with_kernels_too() -> None:
    two, three = (predicted("fp32", True, functions).weights for functions in (PLAINLY, FUNCTIONS))
    assert three > two > 0 and predicted("fp32", False).weights == three


def test_the_cache_grows_with_the_conversation_up_to_its_capacity() -> None:
    bundle = tiny.tiny_bundle("fp32")
    row = bundle.geometry.token_bytes(bundle.manifest.cache_dtype)
    assert row == 256
    assert [predicted("fp32", True, tokens=tokens).cache for tokens in (1, 40, 10**6)] == [row, 40 * row, 128 * row]


def test_terms_make_the_total_and_opening_may_take_more() -> None:
    found = Resident(True, 1, 2, 3, 4, 5, 6, 7, opening=20)
    assert found.total == 28 == sum(found.terms.values()) and found.peak == 28
    assert Resident(True, 1, 2, 3, 4, 5, 6, 7, opening=40).peak == 40


def test_no_kernels_is_heard_by_target_and_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ssdevice.runtime.onnx import kernels

    monkeypatch.setattr(kernels, "library", lambda: tmp_path)
    target, bundle = runtime_target("onnx"), tiny.tiny_bundle("int8")
    for wanted in (True, False):
        found = target.resident(bundle, None, FUNCTIONS, 40, EngineOptions(kernels=wanted))
        assert found is not None and found.kernels is wanted


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the constants were measured on Linux")
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_process_has_the_predicted_memory(precision: str) -> None:
    options = EngineOptions(threads=2, kernels=False)
    prompt = list(range(1, 21))
    measured = measure_memory(tiny.tiny_bundle(precision).folder, None, "adaptive", options, prompt, 20)
    assert predicted(precision, False).total / 1e6 == pytest.approx(measured.resident_mb, rel=0.1)
    assert measured.peak_mb == pytest.approx(measured.resident_mb, rel=0.1)
