"""Operators in one node: the bits of each in its own, no path out of a region and back, no crash on
a wrong text.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ssdevice.export.onnx.editor import CONTRIB, OPSET, Editor
from ssdevice.export.onnx.functions import add_functions
from ssdevice.export.onnx.fused import join_regions
from ssdevice.export.onnx.graphs import show_regions
from ssdevice.runtime.onnx import kernels
from tests.export.onnx import forms
from tests.export.onnx.test_kernels import COMPILER, built, session

ROWS = 3
WIDTH = 64
pytestmark = pytest.mark.skipif(
    COMPILER is None, reason="needs a C++ compiler (Debian: apt-get install g++)"
)


def node(
    kind: str,
    inputs: list[ir.Value],
    names: str,
    width: int = WIDTH,
    domain: str = kernels.DOMAIN,
    **attributes: object,
) -> list[ir.Value]:
    """The outputs of a new node, with these names: rows of ``width`` numbers."""
    made = ir.node(
        kind,
        inputs,
        attributes,
        domain=domain,
        num_outputs=len(names.split()),
        name=f"node_{names}",
    )
    for value, name in zip(made.outputs, names.split(), strict=True):
        value.name = name
        value.shape = ir.Shape([1, ROWS, width])
        value.type = ir.TensorType(ir.DataType.FLOAT)
    return list(made.outputs)


def maker(value: ir.Value) -> ir.Node:
    found = value.producer()
    assert found is not None
    return found


def norms_around_a_standard_operator() -> ir.Model:
    """Norms, one of a sum that a standard operator turns, and an activation."""
    shapes = {"x": (1, ROWS, WIDTH), "y": (1, ROWS, WIDTH), "weight": (WIDTH,)}
    x, y, weight = (forms.value(name, shape) for name, shape in shapes.items())
    a, first = node(kernels.ADD_NORM, [x, y, weight], "a first", epsilon=1e-5)
    b, second = node(kernels.ADD_NORM, [a, first, weight], "b second", epsilon=1e-5)
    (turned,) = node("Neg", [first], "turned", domain="")
    c, third = node(kernels.ADD_NORM, [turned, b, weight], "c third", epsilon=1e-5)
    d, _ = node(kernels.ADD_NORM, [c, third, weight], "d fourth", epsilon=1e-5)
    (out,) = node(kernels.GATED_SILU, [d], "out", WIDTH // 2)
    nodes = [maker(value) for value in (a, b, turned, c, d, out)]
    imports = {"": OPSET, CONTRIB: 1, kernels.DOMAIN: 1}
    return ir.Model(
        ir.Graph([x, y, weight], [second, out], nodes=nodes, opset_imports=imports, name="g"),
        ir_version=11,
    )


def written(model: ir.Model) -> onnx.ModelProto:
    add_functions(model)
    return ir.to_proto(model)


@pytest.mark.parametrize("kind", ["native", pytest.param("portable", marks=pytest.mark.wide)])
def test_a_region_has_the_bits_of_its_nodes_and_no_path_leads_back_into_it(kind: str) -> None:
    joined = norms_around_a_standard_operator()
    join_regions(Editor(joined))
    one = written(joined)
    several = written(norms_around_a_standard_operator())
    # ``turned`` reads the first norms' sum, and the third norm reads it: so they are two regions.
    assert [each.op_type for each in one.graph.node] == [kernels.REGION, "Neg", kernels.REGION]
    onnx.checker.check_model(one)
    rng = np.random.default_rng(0)
    feeds = {"x": (1, ROWS, WIDTH), "y": (1, ROWS, WIDTH), "weight": (WIDTH,)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in feeds.items()}
    shown = onnx.ModelProto()
    shown.CopyFrom(one)
    show_regions(shown)
    assert [list(each.output) for each in shown.graph.node] == [
        list(each.output) for each in several.graph.node
    ]
    for library in (built(kind), None):
        expected = session(several.SerializeToString(), library).run(None, given)
        for model in (one, shown):
            for _ in range(2):  # rooms of the call before are used again
                found = session(model.SerializeToString(), library).run(None, given)
                for mine, theirs in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(mine, theirs)


def test_nodes_may_stand_in_any_order() -> None:
    joined = norms_around_a_standard_operator()
    turned = norms_around_a_standard_operator()
    nodes = list(turned.graph)
    for node in nodes[::-1]:
        turned.graph.remove(node)
        turned.graph.append(node)
    for model in (joined, turned):
        join_regions(Editor(model))
    assert [each.op_type for each in turned.graph] == [each.op_type for each in joined.graph]


def test_one_operator_stays_alone() -> None:
    x = forms.value("x", (1, ROWS, WIDTH))
    (out,) = node(kernels.GATED_SILU, [x], "out", WIDTH // 2)
    graph = ir.Graph([x], [out], nodes=[maker(out)], opset_imports={"": OPSET, kernels.DOMAIN: 1})
    join_regions(Editor(ir.Model(graph, ir_version=11)))
    assert [each.op_type for each in graph] == [kernels.GATED_SILU]


def region(text: str) -> bytes:
    """A model of one region that takes floats ``[1, 2, 8]``, as many as its text says or three, and
    gives floats.
    """
    names = "xyz"[: int(text[0]) if text[:1].isdigit() else 3]
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2, 8])
        for name in names
    ]
    output = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)
    one = onnx.helper.make_node(
        kernels.REGION, list(names), ["out"], domain=kernels.DOMAIN, text=text
    )
    graph = onnx.helper.make_graph([one], "g", inputs, [output])
    imports = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(kernels.DOMAIN, 1)]
    model: bytes = onnx.helper.make_model(
        graph, opset_imports=imports, ir_version=11
    ).SerializeToString()
    return model


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "first line"),
        ("3 1\nAddNorm epsilon=1e-5 : 0 1 2 > 3", "does not fit its operator"),
        ("3 1\nAddNorm epsilon=x : 0 1 2 > 3 4", "a number cannot be read"),
        ("3 1\nAddNorm : 0 1 2 > 3 4", "an attribute is missing"),
        ("3 1\nAddNorm epsilon : 0 1 2 > 3 4", "an attribute has no value"),
        ("3 1\nAddNorm epsilon=1e-5 : 0 1 9 > 3 4", "number is too large"),
        ("3 1\nAddNorm epsilon=1e-5 : 0 1 4 > 3 4", "reads what no step before it makes"),
        ("9999999999 1\nAddNorm epsilon=1e-5 : 0 1 2 > 3 4", "other numbers of inputs or outputs"),
        ("3 9999999999\nAddNorm epsilon=1e-5 : 0 1 2 > 3 4", "other numbers of inputs or outputs"),
        ("3 2\nAddNorm epsilon=1e-5 : 0 1 2 > 3 4", "other numbers of inputs or outputs"),
        ("3 0", "first line"),
        ("3 1\nAddNorm epsilon=1e-5 : 0 1 2 > 3 9999999999", "number is too large"),
        ("-1 1\nAddNorm epsilon=1e-5 : 0 1 2 > 3 4", "other numbers of inputs or outputs"),
        ("3 1\nAddNorm epsilon=1e-5 : 0 1 2 > 2 4", "makes what there is already"),
        ("3 1\nAddNorm epsilon=1e-5 : 0 1 2 >", "reads or makes nothing"),
        ("3 1\n", "make fewer outputs"),
        ("1 1\nNeg : 0 > 1", "no operator of this name"),
        ("1 1\nRegion text=1 : 0 > 1", "no operator of this name"),
        ("2 1\nAdd : 0 1 > 2", "no operator of this name"),
        ("1 1\nInt8Argmax : 0 0 0 0 > 1", "no constants"),
        ("3 1\nInt4Linear : 0 1 2 > 3", "no constants"),
        ("3 1\n\nGatedSilu : 0 > 3", "a line is empty"),
    ],
)
def test_a_text_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        session(region(text), built("native"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 1\nInt8Embedding : 0 0 0 > 1", "no constants|another type than its operator takes"),
        ("2 1\nGatedSilu : 0 > 3\nAddNorm epsilon=1e-5 : 3 0 1 > 2 4", "do not fit each other"),
    ],
)
def test_a_step_that_does_not_take_its_inputs_is_an_error(text: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        one = session(region(text), built("native"))
        one.run(None, {given.name: np.ones((1, 2, 8), np.float32) for given in one.get_inputs()})
