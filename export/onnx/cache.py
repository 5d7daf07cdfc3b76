"""The KV cache of a finished graph in float16: half the memory, and half the bytes that attention reads."""

from __future__ import annotations

import onnx_ir as ir

from ssdevice.contract import ROWS, past_key, past_value
from ssdevice.export.onnx.editor import Editor, shape_of
from ssdevice.runtime.onnx.kernels import HALF_TREE_ATTENTION, TREE_ATTENTION

PAST = (1, 3)
"""Inputs of the operator that the cache holds."""
SINGLE, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def half_cache(edit: Editor, anyhow: bool = False) -> bool:
    """Store the cache in float16; False, and nothing changes, if not all attention of the graph is the operator.

    New rows stay float32 within the graph. Attention rounds them to what the cache will hold, and so does the cast of
    those that leave: a call sees its own rows as every later call will. ``anyhow``: attention of standard operators
    too, which then widens the whole cache in every call.
    """
    graph = edit.graph
    names = {name(layer) for layer in range(len(graph.inputs)) for name in (past_key, past_value)}
    past = [value for value in graph.inputs if value.name in names]
    others = [
        use
        for value in past
        for use in value.uses()
        if (use.node.op_type, use.idx) not in {("Shape", 0), *((TREE_ATTENTION, place) for place in PAST)}
    ]
    joined = [use.node for use in others if (use.node.op_type, use.idx) == ("Concat", 0)]
    if len(joined) != len(others) or (others and not anyhow):
        return False
    for value in past:
        value.type = ir.TensorType(HALF)
    for node in joined:
        for place, rows in enumerate(node.inputs):
            assert rows is not None
            node.replace_input_with(place, _cast(edit, node, _cast(edit, node, rows, HALF) if place else rows, SINGLE))
    for node in graph:
        if node.op_type == TREE_ATTENTION:
            node.op_type = HALF_TREE_ATTENTION
    for at, value in enumerate(graph.outputs):
        if value.name == ROWS:
            value.name = f"{ROWS}_float32"
            graph.outputs[at] = _cast(edit, None, value, HALF)
            graph.outputs[at].name = ROWS
    return True


def _cast(edit: Editor, before: ir.Node | None, value: ir.Value, kind: ir.DataType) -> ir.Value:
    return edit.insert(before, "Cast", [value], shape_of(value), kind, {"to": int(kind)})
