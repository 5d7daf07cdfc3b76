"""Nodes of a graph as our operators (``ssdevice.export.onnx.functions``), where their pattern is found."""

from __future__ import annotations

import numpy as np

from ssdevice.export.onnx.editor import Editor, constant_of, producer, shape_of, sizes_of, source_of
from ssdevice.runtime.onnx.kernels import ADD_NORM, DOMAIN, INT8_ARGMAX, INT8_EMBEDDING, INT8_LINEAR, TIED_EMBEDDING

WIDEST = 16384
"""Inputs that ``Int8Argmax`` takes, at most."""
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
