"""Operators of our own as ONNX functions of standard ones, for runtimes that do not have their kernels."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ssdevice.export.onnx.editor import CONTRIB, OPSET
from ssdevice.runtime.onnx.kernels import DOMAIN, INT4_LINEAR, TREE_ATTENTION

BLOCK = 32
"""Inputs that share a scale."""


def int4_linear() -> ir.Function:
    """``Int4Linear(x [.., R, K], codes [N, K / 32, 16], scales [N, K / 32]; K, N) -> [.., R, N]``."""
    inputs = [ir.Value(name=name) for name in ("x", "codes", "scales")]
    sizes = [ir.RefAttr(name, name, ir.AttributeType.INT) for name in ("K", "N")]
    fixed = [ir.AttrInt64("bits", 4), ir.AttrInt64("block_size", BLOCK), ir.AttrInt64("accuracy_level", 4)]
    product = ir.Node(CONTRIB, "MatMulNBits", inputs, [*sizes, *fixed], num_outputs=1)
    product.outputs[0].name = "y"
    graph = ir.Graph(inputs, product.outputs, nodes=[product], opset_imports={CONTRIB: 1})
    parameters = [ir.Attr(name, ir.AttributeType.INT, None) for name in ("K", "N")]
    return ir.Function(DOMAIN, INT4_LINEAR, graph=graph, attributes=parameters)


def tree_attention() -> ir.Function:
    """``TreeAttention(q [1, R, G N D], past keys [P, N D], keys [R, N D], past values, values, mask [1, R G, P + R])``.

    The result is ``[1, R, N G D]``; query heads are ordered by (group member, key head) and leave by (key head, group
    member). Attributes: ``kv_heads`` N, ``scale``, and the shapes of views: ``heads`` [-1, N, D], ``groups``
    [N, -1, G, D], ``whole`` [1, -1, N G D].
    """
    nodes: list[ir.Node] = []

    def add(kind: str, inputs: list[ir.Value], domain: str = "", **attributes: Any) -> ir.Value:
        made = ir.node(kind, inputs, attributes, domain=domain)
        made.outputs[0].name = f"t{len(nodes)}"
        nodes.append(made)
        return made.outputs[0]

    def view(value: ir.Value, shape: str) -> ir.Value:
        sizes = ir.Node("", "Constant", [], [ir.RefAttr("value_ints", shape, ir.AttributeType.INTS)], num_outputs=1)
        sizes.outputs[0].name = f"t{len(nodes)}"
        nodes.append(sizes)
        return add("Reshape", [value, sizes.outputs[0]])

    names = ("q", "past_keys", "keys", "past_values", "values", "mask")
    q, past_keys, keys, past_values, values, mask = inputs = [ir.Value(name=name) for name in names]
    every_key = view(add("Concat", [past_keys, keys], axis=0), "heads")
    every_value = view(add("Concat", [past_values, values], axis=0), "heads")
    heads = {"transBatchA": 1, "transBatchB": 1, "transB": 1}
    scores = add("FusedMatMul", [view(q, "heads"), every_key], CONTRIB, **heads)
    made = nodes[-1]
    made.attributes.add(ir.RefAttr("alpha", "scale", ir.AttributeType.FLOAT))
    weights = add("Softmax", [add("Add", [scores, mask])], axis=-1)
    out = view(add("FusedMatMul", [weights, every_value], CONTRIB, transBatchB=1), "groups")
    y = view(add("Transpose", [out], perm=[1, 0, 2, 3]), "whole")
    graph = ir.Graph(inputs, [y], nodes=nodes, opset_imports={"": OPSET, CONTRIB: 1})
    kinds = {"kv_heads": "INT", "scale": "FLOAT", "heads": "INTS", "groups": "INTS", "whole": "INTS"}
    parameters = [ir.Attr(name, ir.AttributeType[kind], None) for name, kind in kinds.items()]
    return ir.Function(DOMAIN, TREE_ATTENTION, graph=graph, attributes=parameters)


FUNCTIONS = {INT4_LINEAR: int4_linear, TREE_ATTENTION: tree_attention}


def add_functions(model: ir.Model) -> None:
    """Give a model the functions of the operators that its graph calls."""
    called = {node.op_type for node in model.graph if node.domain == DOMAIN}
    for name in sorted(called):
        made = FUNCTIONS[name]()
        model.functions[made.identifier()] = made
    if called:
        model.opset_imports[DOMAIN] = 1
