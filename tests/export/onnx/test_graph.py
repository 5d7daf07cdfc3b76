"""Graph rewrites: fewer nodes, the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from ssdevice.export.onnx.editor import Editor
from ssdevice.export.onnx.functions import add_functions
from ssdevice.export.onnx.graph import simplify

RNG = np.random.default_rng(0)


def model_of(nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **constants: np.ndarray) -> ir.Model:
    """An onnx_ir model; ``inputs``/``outputs``: name -> (element type, shape)."""
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in outputs.items()],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=11)
    return ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto))


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return list(ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options).run(None, feeds))


def check(model: ir.Model, feeds: dict[str, np.ndarray], **counts: int) -> None:
    """The outputs stay, and the graph then has these many nodes of these kinds."""
    before = run(model, feeds)
    simplify(Editor(model))
    add_functions(model)
    for old, new in zip(before, run(model, feeds), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-6, atol=1e-6)
    kinds = [node.op_type for node in model.graph]
    assert {kind: kinds.count(kind) for kind in counts} == counts


def test_views_that_cancel_leave_nothing() -> None:
    model = model_of(
        [
            helper.make_node("Reshape", ["x", "four"], ["a"]),
            helper.make_node("Transpose", ["a"], ["b"], perm=[0, 2, 1, 3]),
            helper.make_node("Transpose", ["b"], ["c"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", ["c", "two"], ["d"]),
            helper.make_node("Relu", ["d"], ["y"]),
        ],
        {"x": (TensorProto.FLOAT, ["past", 12])},
        {"y": (TensorProto.FLOAT, ["past", 12])},
        four=np.array([1, -1, 3, 4]),
        two=np.array([-1, 12]),
    )
    check(model, {"x": RNG.standard_normal((5, 12)).astype(np.float32)}, Reshape=0, Transpose=0, Relu=1)


def test_rows_of_all_layers_are_gathered_once() -> None:
    """Keys as heads, the accepted path gathered per layer, heads as rows again, layers stacked."""
    nodes, inputs = [], {}
    for i in range(3):
        inputs[f"x{i}"] = (TensorProto.FLOAT, [1, 5, 8])
        nodes += [
            helper.make_node("Reshape", [f"x{i}", "heads"], [f"h{i}"]),
            helper.make_node("Transpose", [f"h{i}"], [f"t{i}"], perm=[0, 2, 1, 3]),
            helper.make_node("Gather", [f"t{i}", "path"], [f"g{i}"], axis=2),
            helper.make_node("Transpose", [f"g{i}"], [f"u{i}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"u{i}", "flat"], [f"r{i}"]),
        ]
    nodes.append(helper.make_node("Concat", ["r0", "r1", "r2"], ["rows"], axis=0))
    inputs["path"] = (TensorProto.INT64, [3])
    model = model_of(
        nodes, inputs, {"rows": (TensorProto.FLOAT, [3, 3, 8])},
        heads=np.array([1, 5, 2, 4]), flat=np.array([1, 3, 8]),
    )  # fmt: skip
    feeds = {f"x{i}": RNG.standard_normal((1, 5, 8)).astype(np.float32) for i in range(3)}
    check(model, {**feeds, "path": np.array([0, 2, 4])}, Gather=1, Concat=1, Transpose=0)


def test_residual_and_norm_become_one_node_and_both_results_stay() -> None:
    model = model_of(
        [
            helper.make_node("Add", ["a", "b"], ["s"]),
            helper.make_node("Relu", ["s"], ["early"]),
            helper.make_node("RMSNormalization", ["s", "w"], ["n"], axis=-1, epsilon=1e-6),
            helper.make_node("Add", ["n", "s"], ["y"]),
        ],
        {name: (TensorProto.FLOAT, [1, 4, 32]) for name in "ab"},
        {name: (TensorProto.FLOAT, [1, 4, 32]) for name in ("early", "y")},
        w=RNG.standard_normal(32).astype(np.float32),
    )
    feeds = {name: RNG.standard_normal((1, 4, 32)).astype(np.float32) for name in "ab"}
    check(model, feeds, AddNorm=1, RMSNormalization=0, Add=1)
