"""Nodes of a graph as our operators (``ssdevice.export.onnx.functions``), where their pattern is found."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from ssdevice.contract import ROWS
from ssdevice.export.onnx.editor import (
    Editor,
    Marked,
    constant_of,
    only_user,
    producer,
    shape_of,
    sizes_of,
    source_of,
)
from ssdevice.runtime.onnx.kernels import (
    CAPPED_ATTENTION,
    DOMAIN,
    GATED_SILU,
    HALF_TREE_ATTENTION,
    INT8_ARGMAX,
    INT8_EMBEDDING,
    INT8_LINEAR,
    ROTARY_SPLIT,
    TIED_EMBEDDING,
    TREE_ATTENTION,
)

WIDEST = 16384
"""Inputs that ``Int8Argmax`` takes, at most."""
HALF = ir.DataType.FLOAT16
LARGE = 1 << 22
"""Bytes of a head that no cache holds; of others, reading half gains nothing."""


def rotary_split(edit: Editor, node: ir.Node) -> bool:
    """The columns of a merged product become queries and keys with their positions, and values."""
    if node.op_type != "Split" or len(node.outputs) != 3:
        return False
    shapes = [sizes_of(value) or () for value in (node.inputs[0], *node.outputs)]
    queries, keys = (only_user(value, "RotaryEmbedding") for value in node.outputs[:2])
    if any(len(shape) != 3 or shape[0] != 1 for shape in shapes):
        return False
    if queries is None or keys is None or queries.inputs[1:] != keys.inputs[1:] or len(keys.inputs) != 3:
        return False
    heads, kv_heads = (turned.attributes.get_int("num_heads", 0) for turned in (queries, keys))
    if not heads or not kv_heads or any(turned.attributes.get_int("interleaved", 0) for turned in (queries, keys)):
        return False
    partial = {turned.attributes.get_int("rotary_embedding_dim", 0) for turned in (queries, keys)}
    widths = [shape[-1] for shape in shapes[1:]]
    if len(partial) != 1 or widths[0] * kv_heads != widths[1] * heads:
        return False
    whole = source_of(node)
    form = {"heads": heads, "kv_heads": kv_heads, "rotary_dim": partial.pop(), "widths": widths}
    outputs = [(shape, whole.dtype) for shape in shapes[1:]]
    made = edit.insert_several(keys, ROTARY_SPLIT, [whole, *keys.inputs[1:]], outputs, form, DOMAIN)
    _join_products(edit, node)
    edit.replace(queries, made[0])
    edit.replace(keys, made[1])
    edit.replace_value(node.outputs[2], made[2])
    return True


def gated_silu(edit: Editor, node: ir.Node) -> bool:
    """``g * sigmoid(g) * u`` of the two halves of a merged product."""
    if node.op_type != "Mul":
        return False
    silu = producer(node.inputs[0], "Mul")
    up = node.inputs[1]
    split = producer(up, "Split")
    if silu is None or split is None or len(split.outputs) != 2 or up is not split.outputs[1]:
        return False
    gate = split.outputs[0]
    share = producer(silu.inputs[1], "Sigmoid")
    if silu.inputs[0] is not gate or share is None or share.inputs[0] is not gate:
        return False
    whole, shape, users = source_of(split), shape_of(node.outputs[0]), {use.node for use in gate.uses()}
    if users != {silu, share} or len(up.uses()) != 1 or shape_of(gate) != shape or shape_of(up) != shape:
        return False
    if len(silu.outputs[0].uses()) != 1 or len(share.outputs[0].uses()) != 1:
        return False
    _join_products(edit, split)
    edit.replace(node, edit.insert(node, GATED_SILU, [whole], shape, whole.dtype, None, DOMAIN))
    return True


def best_column(edit: Editor, node: ir.Node) -> bool:
    """A choice of one of the columns of an eight-bit product, for a finished graph; ``nodes.show_products`` undoes it.

    The node's name is that of the product.
    """
    k = constant_of(node.inputs[1]) if node.op_type == "TopK" else None
    if k is None or k.tolist() != [1] or node.outputs[0].uses():
        return False
    view = producer(node.inputs[0], "Reshape")
    product = producer(view.inputs[0] if view is not None else node.inputs[0], INT8_LINEAR)
    codes = constant_of(product.inputs[1]) if product is not None else None
    if product is None or codes is None or len(codes) > WIDEST or codes.size < LARGE:
        return False
    between = (product, view) if view is not None else (product,)
    if any(len(before.outputs[0].uses()) != 1 for before in between):
        return False
    rows, ids = shape_of(product.outputs[0]) or (), node.outputs[1]
    best = edit.insert(node, INT8_ARGMAX, product.inputs, (*rows[:-1], 1), ids.dtype, dict(product.attributes), DOMAIN)
    made = best.producer()
    assert made is not None
    made.name = product.outputs[0].name
    edit.replace_value(ids, edit.reshape(node, best, shape_of(ids) or ()))
    for use in source_of(product, 1).uses():
        if use.node.op_type == INT8_EMBEDDING:
            use.node.op_type = TIED_EMBEDDING
    edit.graph.remove([node, *between[::-1]], safe=True)
    return True


def _join_products(edit: Editor, split: ir.Node) -> None:
    """The products whose columns a split gave are shown as one, by its input."""
    own = [product for value in split.outputs for product in edit.products if product.output is value]
    if len(own) == len(split.outputs):
        weights = tuple(weight for product in own for weight in product.weights)
        edit.products[edit.products.index(own[0])] = Marked(weights, own[0].source, source_of(split))
        for product in own[1:]:
            edit.products.remove(product)


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
