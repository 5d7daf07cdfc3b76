"""Graphs that say impossible sizes to the kernels: an error of the node, after which process and
session go on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ssdevice.runtime.onnx import kernels
from tests.compiled_kernels import COMPILER, NO_COMPILER, built
from tests.fuzz.operator_graphs import Node, region

pytestmark = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
F = np.float32
H = np.float16
I8 = np.int8
U8 = np.uint8
J = np.int64
B = np.bool_
X = np.arange(4, dtype=F)


def opened(node: Node | Path) -> ort.InferenceSession:
    """A session of a node, or of a file."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.register_custom_ops_library(str(built("native")))
    return ort.InferenceSession(str(node) if isinstance(node, Path) else node.model(), options)


def test_endless_rows_of_no_numbers_take_no_time() -> None:
    rows = np.zeros((3, 1 << 40, 0), F)
    for node in (
        Node(kernels.GATED_SILU, (rows,)),
        Node(kernels.ADD_NORM, (rows, rows, rows[0, 0]), (1, 1), {"epsilon": 1e-5}),
    ):
        assert opened(node).run(None, node.feeds())[0].shape == rows.shape


@pytest.mark.parametrize(
    ("text", "outputs"),
    [
        ("2 1\nGatedSilu : 0 > 2", 1),
        ("1 2\nGatedSilu : 0 > 1\nGatedSilu : 0 > 2", 1),
        ("1 1\nGatedSilu : 0 > 1", 2),
    ],
)
def test_a_region_whose_node_has_other_inputs_or_outputs_is_refused(
    text: str, outputs: int
) -> None:
    with pytest.raises(Exception, match="other numbers of inputs or outputs"):
        opened(region(text, X, types=(1,) * outputs))


@pytest.mark.parametrize("text", ["1 0\n", "0 0\n", "1 1\n"])
def test_a_region_without_steps_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="other numbers|make fewer outputs"):
        opened(region(text, X))


def attention(
    kind: str, fresh: int = 1, past: int = 3, queries: int = 16, **attributes: Any
) -> Node:
    old = np.zeros((past, 16), H if kind == kernels.HALF_TREE_ATTENTION else F)
    new = np.zeros((fresh, 16), F)
    more = np.zeros((0, 16), F)
    mask = np.zeros((1, 1, past + fresh), F)
    inputs = (np.zeros((1, 1, queries), F), old, new, more, old, new, more, mask)
    return Node(kind, inputs, attributes={"kv_heads": 1, "scale": 1.0, **attributes})


@pytest.mark.parametrize("kind", [kernels.TREE_ATTENTION, kernels.HALF_TREE_ATTENTION])
def test_attention_without_new_rows_queries_or_heads_is_refused(kind: str) -> None:
    calls = {
        "no new rows": attention(kind, fresh=0),
        "do not fit the keys": attention(kind, queries=0),
        "not positive": attention(kind, kv_heads=0),
        "do not fit": attention(kind, kv_heads=1 << 40),
    }
    for said, node in calls.items():
        with pytest.raises(Exception, match=said):
            opened(node).run(None, node.feeds())


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(4, (1 << 63) - 2), ((1 << 63) - 2, 1), (8, 1 << 62), (1 << 62, 1 << 61)],
)
def test_numbers_of_heads_that_add_up_to_few_are_refused(heads: int, kv_heads: int) -> None:
    rows = np.zeros((1, 1, 8), F)
    angles = np.zeros((1, 1, 0), F)
    node = Node(
        kernels.ROTARY_SPLIT,
        (rows, angles, angles),
        (1, 1, 1),
        {"heads": heads, "kv_heads": kv_heads},
    )
    with pytest.raises(Exception, match="a size is too large|do not fit"):
        opened(node).run(None, node.feeds())


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (200_000, 1)])
def test_weights_of_no_size_or_more_than_sums_hold_are_refused(shape: tuple[int, int]) -> None:
    inputs = (X, np.zeros(shape, I8), np.ones(shape[1], F), np.array(128, U8))
    for kind, types in ((kernels.INT8_LINEAR, (1,)), (kernels.INT8_ARGMAX, (7,))):
        with pytest.raises(Exception, match="no constants|empty|too wide"):
            opened(Node(kind, inputs, types, constants=frozenset({1, 2, 3})))


@pytest.mark.parametrize("past", [0, 1])
def test_weights_between_the_places_of_their_numbers_are_refused(past: int, tmp_path: Path) -> None:
    model = onnx.load_from_string(
        Node(kernels.HALF_LINEAR, (X[None], np.ones((4, 512), H)), constants=frozenset({1})).model()
    )
    onnx.save(
        model, tmp_path / "g.onnx", save_as_external_data=True, location="weights", size_threshold=0
    )
    model = onnx.load(tmp_path / "g.onnx", load_external_data=False)
    weights = (tmp_path / "weights").read_bytes()
    (tmp_path / "weights").write_bytes(bytes(4096 + past) + weights)
    (offset,) = (
        entry for entry in model.graph.initializer[0].external_data if entry.key == "offset"
    )
    offset.value = str(4096 + past)
    onnx.save(model, tmp_path / "g.onnx")
    if not past:
        assert opened(tmp_path / "g.onnx").run(None, {"i0": X[None]})[0][0, 0] == X.sum()
        return
    with pytest.raises(Exception, match="not aligned"):
        opened(tmp_path / "g.onnx")


def test_a_session_goes_on_after_an_error() -> None:
    rows = np.array([[1, -1, 1, 2]], F)
    node = region(
        "2 2\nGatedSilu : 0 > 4\nAddNorm epsilon=1e-5 : 4 4 1 > 2 3",
        rows,
        rows[0, :2],
        types=(1, 1),
    )
    session = opened(node)
    before = session.run(None, node.feeds())[0]
    for wrong in (np.zeros(3, F), np.zeros((1, 2), F), np.zeros(0, F)):
        with pytest.raises(Exception, match="Region: AddNorm: its rows do not fit"):
            session.run(None, {**node.feeds(), "i1": wrong})
    np.testing.assert_array_equal(session.run(None, node.feeds())[0], before)
