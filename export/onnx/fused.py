"""Nodes of a graph as our operators (``ssdevice.export.onnx.functions``), where their pattern is found."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ssdevice.contract import ROWS
from ssdevice.export.onnx.editor import Editor, constant_of, producer, shape_of, sizes_of, source_of
from ssdevice.runtime.onnx.kernels import (
    ADD_NORM,
    CAPPED_ATTENTION,
    DOMAIN,
    HALF_TREE_ATTENTION,
    INT8_ARGMAX,
    INT8_EMBEDDING,
    INT8_LINEAR,
    TIED_EMBEDDING,
    TREE_ATTENTION,
)

WIDEST = 16384
"""Inputs that ``Int8Argmax`` takes, at most."""
HALF = ir.DataType.FLOAT16
LARGE = 1 << 22
"""Bytes of a head that no cache holds; of others, reading half gains nothing."""


def add_norms(edit: Editor) -> None:
    """Residual additions and the RMS normalizations of their sums become one node each."""
    for node in [node for node in edit.graph if node.op_type == "RMSNormalization"]:
        total = source_of(node)
        shape, add = shape_of(total) or (), producer(total, "Add")
        if node.attributes.get_int("axis", -1) != -1 or len(shape) not in (2, 3):
            continue
        if add is not None and shape_of(add.inputs[0]) == shape_of(add.inputs[1]):
            terms = list(add.inputs)
        elif producer(total, "Concat") is not None and (sizes := sizes_of(total)) is not None:
            # Main rows joined by stream rows: the kernel all other layers use, with nothing to add, because another one
            # rounds differently and a row must not depend on the schedule.
            add, terms = None, [total, edit.constant(np.zeros(sizes, np.float32))]
        else:
            continue
        # The sum must exist before its other users, which may stand before this normalization.
        epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
        outputs = [(shape, total.dtype)] * 2
        made = edit.insert_several(add or node, ADD_NORM, [*terms, node.inputs[1]], outputs, epsilon, DOMAIN)
        if add is not None:
            edit.replace_value(total, made[1])
        edit.replace(node, made[0])
    edit.clean()


def best_columns(edit: Editor) -> None:
    """Choices of one of the columns of large eight-bit products; ``nodes.show_choices`` undoes it.

    A node's name is that of the product.
    """
    for node in [node for node in edit.graph if node.op_type == "TopK"]:
        product, k = producer(node.inputs[0], INT8_LINEAR), constant_of(node.inputs[1])
        codes = constant_of(product.inputs[1]) if product is not None else None
        if product is None or codes is None or len(codes) > WIDEST or codes.size < LARGE:
            continue
        if k is None or k.tolist() != [1] or node.outputs[0].uses() or len(product.outputs[0].uses()) != 1:
            continue
        ids, form = node.outputs[1], dict(product.attributes)
        best = edit.insert(node, INT8_ARGMAX, product.inputs, shape_of(ids), ids.dtype, form, DOMAIN).producer()
        assert best is not None
        best.name = product.outputs[0].name
        edit.replace_value(ids, best.outputs[0])
        for use in source_of(product, 1).uses():
            if use.node.op_type == INT8_EMBEDDING:
                use.node.op_type = TIED_EMBEDDING
        edit.graph.remove([node, product], safe=True)


def half_cache(edit: Editor, cache: Collection[str]) -> bool:
    """Store the cache of a finished graph in float16; False, and nothing changes, if its attention has no kernel.

    ``cache``: the names of its past keys and values, also of layers that the graph does not compute.

    Without one every call would widen the whole cache. New rows stay float32 within the graph. Attention rounds them
    to what the cache will hold, and so does the cast of those that leave: a call sees its own rows as later calls will.
    """
    graph = edit.graph
    if any(node.op_type == CAPPED_ATTENTION for node in graph):
        return False
    for node in graph:
        if node.op_type == TREE_ATTENTION:
            node.op_type = HALF_TREE_ATTENTION
    for value in graph.inputs:
        if value.name in cache:
            value.type = ir.TensorType(HALF)
    for at, value in enumerate(graph.outputs):
        if value.name == ROWS:
            value.name = f"{ROWS}_float32"
            made = edit.insert(None, "Cast", [value], shape_of(value), HALF, {"to": int(HALF)})
            graph.outputs[at], made.name = made, ROWS
    return True
