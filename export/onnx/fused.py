"""Nodes of a graph as our operators (``ssdevice.export.onnx.functions``), where their pattern is found."""

from __future__ import annotations

import onnx_ir as ir

from ssdevice.export.onnx.editor import (
    CONTRIB,
    SKIP_NORM,
    Editor,
    Marked,
    Shape,
    constant_of,
    producer,
    shape_of,
    source_of,
)
from ssdevice.export.onnx.graph import JOIN, WIDTH
from ssdevice.runtime.onnx.kernels import (
    ADD_NORM,
    DOMAIN,
    GATED_SILU,
    INT8_ARGMAX,
    INT8_EMBEDDING,
    INT8_LINEAR,
    ROTARY_SPLIT,
    TIED_EMBEDDING,
    TREE_ATTENTION,
)

WIDEST = 16384
"""Inputs that ``Int8Argmax`` takes, at most."""
LARGE = 1 << 22
"""Bytes of a head that no cache holds; of others, reading half gains nothing."""


def rotary_split(edit: Editor, node: ir.Node) -> bool:
    """The columns of a merged product become queries and keys with their positions, and values."""
    if node.op_type != "Split" or len(node.outputs) != 3:
        return False
    shapes = [shape_of(value) for value in (node.inputs[0], *node.outputs)]
    rotated = [_only_user(value, "RotaryEmbedding") for value in node.outputs[:2]]
    if any(shape is None or len(shape) != 3 or shape[0] != 1 or None in shape for shape in shapes):
        return False
    queries, keys = rotated
    if queries is None or keys is None or queries.inputs[1:] != keys.inputs[1:] or len(keys.inputs) != 3:
        return False
    attributes = {}
    for name, turned in (("heads", queries), ("kv_heads", keys)):
        attributes[name] = turned.attributes.get_int("num_heads", 0)
        if turned.attributes.get_int("interleaved", 0) or not attributes[name]:
            return False
    partial = {turned.attributes.get_int("rotary_embedding_dim", 0) for turned in (queries, keys)}
    widths = [int(shape[-1] or 0) for shape in shapes[1:] if shape is not None]
    if len(partial) != 1 or widths[0] * attributes["kv_heads"] != widths[1] * attributes["heads"]:
        return False
    whole, angles = source_of(node), keys.inputs[1:]
    extra = {**attributes, "rotary_dim": partial.pop(), "widths": widths}
    kind = whole.dtype
    made = edit.insert(keys, ROTARY_SPLIT, [whole, *angles], shapes[1], kind, extra, DOMAIN, outputs=3).producer()
    assert made is not None
    _join_products(edit, node)
    for old, new in zip((queries, keys), made.outputs[:2], strict=True):
        edit.replace(old, new)
    edit.replace_value(node.outputs[2], made.outputs[2])
    return True


def added_norm(edit: Editor, node: ir.Node) -> bool:
    """ONNX Runtime's residual addition and normalization, which takes ten times as long for few rows."""
    if node.op_type != SKIP_NORM or node.domain != CONTRIB or len(node.inputs) != 3:
        return False
    normed, total = node.outputs[0], node.outputs[3]
    attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    shape, kind = shape_of(normed), normed.dtype
    made = edit.insert(node, ADD_NORM, node.inputs, shape, kind, attributes, DOMAIN, outputs=2).producer()
    assert made is not None
    made.outputs[1].shape, made.outputs[1].type = normed.shape, normed.type
    edit.replace_value(total, made.outputs[1])
    edit.replace(node, made.outputs[0])
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
    parts = {id(product.output): product for product in edit.products}
    own = [(parts[id(value)], (shape_of(value) or (0,))[-1]) for value in split.outputs if id(value) in parts]
    if len(own) == len(split.outputs):
        name = JOIN.join(f"{product.weight}{WIDTH}{width}" for product, width in own)
        first = own[0][0]
        edit.products[edit.products.index(first)] = Marked(name, first.source, source_of(split))
        for product, _ in own[1:]:
            edit.products.remove(product)


def attention_in_one(edit: Editor, node: ir.Node) -> bool:
    """The nodes of attention over past and new rows become the operator that stands for them."""
    if node.op_type != "Softmax":
        return False
    total = producer(node.inputs[0], "Add")
    scores = producer(total.inputs[0], "FusedMatMul") if total is not None else None
    product = _only_user(node.outputs[0], "FusedMatMul")
    if total is None or scores is None or product is None or product.inputs[0] is not node.outputs[0]:
        return False
    heads, keys, values = (_viewed(value) for value in (*scores.inputs, product.inputs[1]))
    joined = [producer(value, "Concat") for value in (keys, values)]
    shape = shape_of(scores.inputs[0])
    mask = total.inputs[1]
    if heads is None or mask is None or shape is None or None in shape or len(shape) != 3:
        return False
    if any(cat is None or len(cat.inputs) < 2 or cat.attributes.get_int("axis", 0) != 0 for cat in joined):
        return False
    end = _end(product)
    queries, out, masked = shape_of(heads), shape_of(end.outputs[0]), shape_of(mask)
    if queries is None or queries != out or len(queries) != 3 or queries[0] != 1 or masked is None:
        return False
    grouped, kv_heads, dim = shape
    rows, width = queries[1:]
    if None in (grouped, kv_heads, dim, rows, width) or masked[:-1] != (1, grouped):
        return False
    assert kv_heads and dim and rows and grouped
    attributes = {
        "kv_heads": kv_heads,
        "scale": scores.attributes.get_float("alpha", 1.0),
        "rows": [-1, kv_heads * dim],
        "heads": [-1, kv_heads, dim],
        "groups": [kv_heads, -1, grouped // rows, dim],
        "whole": [1, -1, width],
    }
    inputs = [heads, *(value for cat in joined if cat is not None for value in _past_and_new(edit, cat)), mask]
    kind = end.outputs[0].dtype
    edit.replace(end, edit.insert(end, TREE_ATTENTION, inputs, out, kind, attributes, DOMAIN))
    return True


def _past_and_new(edit: Editor, joined: ir.Node) -> list[ir.Value | None]:
    """The rows of the cache and the new ones, which the operator takes with a leading dimension of one as well."""
    past, *new = joined.inputs
    if len(new) == 1:
        return [past, _row_view(new[0]) or new[0]]
    whole = [_row_view(value) for value in new]
    lead: Shape = (1,) if None not in whole else ()
    parts = whole if lead else new
    sizes = [shape_of(value) for value in parts]
    rows = [shape[-2] if shape is not None else None for shape in sizes]
    width = (shape_of(joined.outputs[0]) or (None,))[-1]
    total = None if None in rows else sum(size or 0 for size in rows)
    kind, attributes = joined.outputs[0].dtype, {"axis": len(lead)}
    return [past, edit.insert(joined, "Concat", parts, (*lead, total, width), kind, attributes)]


def _row_view(value: ir.Value | None) -> ir.Value | None:
    """The ``[1, S, W]`` of which a value ``[S, W]`` is a view."""
    view = _viewed(value)
    shape = shape_of(view)
    same = shape is not None and len(shape) == 3 and shape[0] == 1 and shape[1:] == shape_of(value)
    return view if same else None


def _viewed(value: ir.Value | None) -> ir.Value | None:
    """What a Reshape views."""
    view = producer(value, "Reshape")
    return view.inputs[0] if view is not None else None


def _only_user(value: ir.Value, kind: str) -> ir.Node | None:
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == kind else None


def _end(product: ir.Node) -> ir.Node:
    """The last of the views that bring the heads ``[N, R G, D]`` of a product into the order of the rows."""
    view = _only_user(product.outputs[0], "Reshape")
    turned = _only_user(view.outputs[0], "Transpose") if view is not None else None
    whole = _only_user(turned.outputs[0], "Reshape") if turned is not None else None
    if whole is not None and turned is not None and tuple(turned.attributes["perm"].as_ints()) == (1, 0, 2, 3):
        return whole
    return view if view is not None else product
