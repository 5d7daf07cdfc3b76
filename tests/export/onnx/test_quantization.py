"""Quantized forms: how near they are, and that ONNX Runtime computes with them row by row."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ssdevice.export.onnx.graph import Editor, finish
from ssdevice.export.onnx.linears import LINEAR, LINEAR_DOMAIN
from ssdevice.export.onnx.quantization import BLOCK, Int4Weight, Int8Weight, WeightStore, quantize
from ssdevice.export.plan import Quant

RNG = np.random.default_rng(0)


def test_int8_errs_by_half_a_level_at_most() -> None:
    weight = RNG.standard_normal((96, 40)).astype(np.float32)
    form = Int8Weight.of(weight)
    assert (np.abs(form.dequantized() - weight) <= form.scale * 0.5001).all()
    assert form.values.min() >= -127


@pytest.mark.parametrize("inputs", [32, 40, 704])
def test_int4_errs_by_half_a_level_but_at_the_end_of_the_range(inputs: int) -> None:
    weight = RNG.standard_normal((inputs, 24)).astype(np.float32)
    form = Int4Weight.of(weight)
    assert form.packed.shape == (24, -(-inputs // BLOCK), BLOCK // 2)
    # 16 codes around a zero point of 8 reach 7 levels to one side and 8 to the other.
    level = np.repeat(np.abs(form.scale), BLOCK, axis=1).T[:inputs]
    assert (np.abs(form.dequantized() - weight) <= level * 1.0001).all()


def test_columns_of_zeros_stay_zero() -> None:
    weight = np.zeros((64, 3), np.float32)
    assert not Int8Weight.of(weight).dequantized().any()
    assert not Int4Weight.of(weight).dequantized().any()


def linear_graph(rows: int, weights: list[np.ndarray], quant: Quant) -> ort.InferenceSession:
    """x [1, rows, K] through one linear per weight [N, K], quantized."""
    x = ir.Value(name="x", shape=ir.Shape([1, rows, weights[0].shape[1]]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes, initializers, outputs = [], [], []
    for i, weight in enumerate(weights):
        value = ir.Value(
            name=f"w{i}", shape=ir.Shape(weight.shape), type=ir.TensorType(ir.DataType.FLOAT),
            const_value=ir.Tensor(weight, name=f"w{i}"),
        )  # fmt: skip
        node = ir.node(LINEAR, [x, value], domain=LINEAR_DOMAIN)
        out = node.outputs[0]
        out.name, out.shape = f"y{i}", ir.Shape([1, rows, weight.shape[0]])
        out.type = ir.TensorType(ir.DataType.FLOAT)
        nodes.append(node)
        initializers.append(value)
        outputs.append(out)
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=initializers, opset_imports={"": 23, "com.microsoft": 1})
    edit = Editor(ir.Model(graph, ir_version=11))
    quantize(edit, quant, WeightStore())
    finish(edit)
    return ort.InferenceSession(ir.serde.serialize_model(edit.model).SerializeToString())


@pytest.mark.parametrize("quant", [Quant.FP32, Quant.INT8, Quant.INT4])
def test_rows_do_not_see_each_other(quant: Quant) -> None:
    weights = [RNG.standard_normal((n, 256)).astype(np.float32) for n in (256, 128)]
    many, one = linear_graph(8, weights, quant), linear_graph(1, weights, quant)
    x = RNG.standard_normal((1, 8, 256)).astype(np.float32)
    outputs = many.run(None, {"x": x})
    changed = x.copy()
    changed[:, 3:] = RNG.standard_normal((1, 5, 256)) * 1000
    changed[:, 4] = 0
    again = many.run(None, {"x": changed})
    for before, after in zip(outputs, again, strict=True):
        np.testing.assert_array_equal(before[:, :3], after[:, :3])
        assert np.isfinite(after).all()
        assert not after[:, 4].any(), "a row of zeros gives zeros"
    for i in range(8):
        for whole, alone in zip(outputs, one.run(None, {"x": x[:, i : i + 1]}), strict=True):
            np.testing.assert_allclose(whole[:, i], alone[:, 0], rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(("quant", "error"), [(Quant.FP32, 1e-6), (Quant.INT8, 0.02), (Quant.INT4, 0.15)])
def test_products_are_near_those_of_float(quant: Quant, error: float) -> None:
    weights = [RNG.standard_normal((n, 704)).astype(np.float32) for n in (256, 64)]
    x = RNG.standard_normal((1, 5, 704)).astype(np.float32)
    for weight, out in zip(weights, linear_graph(5, weights, quant).run(None, {"x": x}), strict=True):
        exact = x @ weight.T
        assert np.square(out - exact).mean() ** 0.5 <= error * np.square(exact).mean() ** 0.5
