"""Operators of our own as ONNX functions of standard ones, for runtimes that do not have their kernels."""

from __future__ import annotations

import onnx_ir as ir

from ssdevice.export.onnx.editor import CONTRIB
from ssdevice.runtime.onnx.kernels import DOMAIN, INT4_LINEAR

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


FUNCTIONS = {INT4_LINEAR: int4_linear}


def add_functions(model: ir.Model) -> None:
    """Give a model the functions of the operators that its graph calls."""
    called = {node.op_type for node in model.graph if node.domain == DOMAIN}
    for name in sorted(called):
        made = FUNCTIONS[name]()
        model.functions[made.identifier()] = made
    if called:
        model.opset_imports[DOMAIN] = 1
