"""Rewrites of exported ONNX graphs: fewer nodes for the same numbers.

On small models a node costs as much as its arithmetic, so views are merged, gathers of the accepted path are moved to
one place, and linears that read the same input become one product. Every rewrite keeps the values it replaces exactly,
up to the order of the columns inside a merged product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import (
    CONTRIB,
    SKIP_NORM,
    Editor,
    Shape,
    clean,
    constant_of,
    producer,
    role_of,
    shape_of,
    source_of,
)

VOCABULARY = 256
"""An argmax over fewer values is not worth a TopK."""
LOGITS = "logits"
"""Name, inside the graphs, of the main rows' logits: what decides the tokens."""
READS = "<-"
"""In the name of a product's output, between the weight's name and that of the rows it reads."""
JOIN, WIDTH = "|", ":"
"""In that name, for a merged product that no node splits: between weights, and before the columns of each."""
Rule = Callable[[Editor, ir.Node], bool]


def views_as_reshapes(edit: Editor, node: ir.Node) -> bool:
    """Unsqueeze, Squeeze, a gather of the only element, a transpose that moves no data: all are a Reshape."""
    source, out = node.inputs[0], node.outputs[0]
    shape = shape_of(out)
    if source is None or shape is None or shape.count(None) > 1 or source.is_initializer():
        return False
    if node.op_type == "Transpose":
        before = shape_of(source)
        perm = node.attributes["perm"].as_ints()
        if before is None or [d for d in perm if before[d] != 1] != [d for d in range(len(before)) if before[d] != 1]:
            return False
    elif node.op_type == "Gather":
        before, index = shape_of(source), constant_of(node.inputs[1])
        axis = node.attributes.get_int("axis", 0)
        if before is None or index is None or index.ndim or before[axis] != 1:
            return False
    elif node.op_type not in ("Unsqueeze", "Squeeze"):
        return False
    edit.replace(node, edit.reshape(node, source, shape))
    return True


def joined_reshapes(edit: Editor, node: ir.Node) -> bool:
    """A reshape of a reshape, and one that changes nothing."""
    if node.op_type != "Reshape":
        return False
    source, shape = node.inputs[0], shape_of(node.outputs[0])
    target = constant_of(node.inputs[1])
    if source is None or target is None:
        return False
    if shape is None or None in shape:
        shape = tuple(None if size == -1 else int(size) for size in target)
    if 0 in target or shape.count(None) > 1:
        return False
    inner = producer(source, "Reshape")
    if inner is not None:
        edit.replace(node, edit.reshape(node, source_of(inner), shape))
        return True
    if shape_of(source) == shape and not (node.outputs[0].is_graph_output() and source.producer() is None):
        edit.replace(node, source)
        return True
    return False


def joined_transposes(edit: Editor, node: ir.Node) -> bool:
    """A transpose of a transpose, also with a leading dimension of one dropped in between."""
    if node.op_type != "Transpose":
        return False
    perm = list(node.attributes["perm"].as_ints())
    source = source_of(node)
    inner = producer(source, "Transpose")
    if inner is not None:
        first = inner.attributes["perm"].as_ints()
        both = [first[d] for d in perm]
        origin = source_of(inner)
        if both == sorted(both):
            edit.replace(node, origin)
        else:
            shape = shape_of(node.outputs[0])
            edit.replace(node, edit.insert(node, "Transpose", [origin], shape, origin.dtype, {"perm": both}))
        return True
    view = producer(source, "Reshape")
    if view is not None and producer(view.inputs[0], "Transpose") is not None:
        whole, shape = shape_of(view.inputs[0]), shape_of(source)
        out = shape_of(node.outputs[0])
        if whole is not None and shape is not None and out is not None and whole == (1, *shape) and None not in out:
            lifted = [0, *(d + 1 for d in perm)]
            moved = edit.insert(node, "Transpose", [view.inputs[0]], (1, *out), source.dtype, {"perm": lifted})
            edit.replace(node, edit.reshape(node, moved, out))
            return True
    return False


def gathers_first(edit: Editor, node: ir.Node) -> bool:
    """A gather of rows after a transpose or reshape becomes one before it, where rows of all layers look alike."""
    if node.op_type != "Gather":
        return False
    source, index = source_of(node), source_of(node, 1)
    axis = node.attributes.get_int("axis", 0)
    picked, shape = shape_of(index), shape_of(source)
    if picked is None or len(picked) != 1 or shape is None or None in shape or picked[0] is None:
        return False
    content = constant_of(index)
    if content is not None and np.array_equal(content, np.arange(shape[axis] or 0)):
        edit.replace(node, source)
        return True
    out = (*shape[:axis], picked[0], *shape[axis + 1 :])
    above = producer(source, "Transpose")
    if above is not None:
        perm = above.attributes["perm"].as_ints()
        inner_shape = shape_of(above.inputs[0])
        assert inner_shape is not None
        inner_axis = perm[axis]
        inner_out = (*inner_shape[:inner_axis], picked[0], *inner_shape[inner_axis + 1 :])
        got = edit.insert(node, "Gather", [above.inputs[0], index], inner_out, source.dtype, {"axis": inner_axis})
        edit.replace(node, edit.insert(node, "Transpose", [got], out, source.dtype, {"perm": list(perm)}))
        return True
    above = producer(source, "Reshape")
    if above is not None and (inner_shape := shape_of(above.inputs[0])) is not None and None not in inner_shape:
        for inner_axis, size in enumerate(inner_shape):
            if size == shape[axis] and prod(inner_shape[:inner_axis]) == prod(shape[:axis]):  # type: ignore[arg-type]
                inner_out = (*inner_shape[:inner_axis], picked[0], *inner_shape[inner_axis + 1 :])
                got = edit.insert(
                    node, "Gather", [above.inputs[0], index], inner_out, source.dtype, {"axis": inner_axis}
                )
                edit.replace(node, edit.reshape(node, got, out))
                return True
    return False


def one_gather_of_rows(edit: Editor, node: ir.Node) -> bool:
    """The accepted path's rows of every layer, gathered one by one and joined, become one gather of the joined rows."""
    if node.op_type != "Concat" or node.attributes.get_int("axis") != 0 or len(node.inputs) < 2:
        return False
    sources, index = [], None
    for value in node.inputs:
        view = producer(value, "Reshape")
        gather = producer(view.inputs[0] if view is not None else value, "Gather")
        if gather is None or shape_of(value) is None or (index is not None and gather.inputs[1] is not index):
            return False
        index, source = gather.inputs[1], source_of(gather)
        shape, rows = shape_of(source), shape_of(index)
        whole = shape_of(value)
        axis = gather.attributes.get_int("axis", 0)
        if shape is None or whole is None or len(whole) != 3 or rows is None or len(rows) != 1 or None in shape:
            return False
        if whole[0] != 1 or prod(shape[:axis]) != 1 or prod(shape[axis + 1 :]) != whole[2]:  # type: ignore[arg-type]
            return False
        sources.append((source, (1, shape[axis], whole[2])))
    assert index is not None
    flat = [edit.reshape(node, source, shape) for source, shape in sources]
    _, rows_in, width = sources[0][1]
    joined = edit.insert(node, "Concat", flat, (len(flat), rows_in, width), flat[0].dtype, {"axis": 0})
    edit.replace(node, edit.insert(node, "Gather", [joined, index], None, joined.dtype, {"axis": 1}))
    return True


def sliced_tables(edit: Editor, node: ir.Node) -> bool:
    """Columns cut out of a gathered row of a constant table: cut them out of the table."""
    if node.op_type != "Slice" or len(node.inputs) != 5:
        return False
    gather = producer(node.inputs[0], "Gather")
    bounds = [constant_of(value) for value in node.inputs[1:]]
    if gather is None or any(b is None or b.size != 1 for b in bounds):
        return False
    table, shape = constant_of(gather.inputs[0]), shape_of(node.inputs[0])
    start, end, axis, step = (int(b.reshape(-1)[0]) for b in bounds if b is not None)
    if table is None or table.ndim != 2 or shape is None or axis % len(shape) != len(shape) - 1:
        return False
    name = f"{gather.inputs[0].name}:{start}:{end}:{step}" if gather.inputs[0] is not None else None
    known = edit.graph.initializers.get(name or "")
    cut = (
        known
        if known is not None
        else edit.constant(np.ascontiguousarray(table[:, start:end:step]), name, role_of(gather.inputs[0]))
    )
    out = shape_of(node.outputs[0])
    edit.replace(node, edit.insert(node, "Gather", [cut, gather.inputs[1]], out, cut.dtype, {"axis": 0}))
    return True


def rms_normalization(edit: Editor, node: ir.Node) -> bool:
    """``x / sqrt(mean(x * x) + eps) * weight`` in one node."""
    if node.op_type != "Mul":
        return False
    for weight, scaled in (node.inputs, node.inputs[::-1]):
        scale, product = constant_of(weight), producer(scaled, "Mul")
        if scale is None or product is None or scale.shape != (shape_of(scaled) or ())[-1:]:
            continue
        for x, inverse in (product.inputs, product.inputs[::-1]):
            eps = _epsilon(x, inverse)
            if eps is not None:
                out, attributes = node.outputs[0], {"axis": -1, "epsilon": eps}
                made = edit.insert(node, "RMSNormalization", [x, weight], shape_of(out), out.dtype, attributes)
                edit.replace(node, made)
                return True
    return False


def _epsilon(x: ir.Value | None, inverse: ir.Value | None) -> float | None:
    """eps, if ``inverse`` is ``1 / sqrt(mean(x * x) + eps)`` over the last dimension."""
    values = [inverse]
    for kind in ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Mul"):
        node = producer(values[-1], kind)
        if node is None:
            return None
        values += [node.inputs[0]]
        if kind == "Add":
            eps = constant_of(node.inputs[1])
        elif kind == "ReduceMean" and list(constant_of(node.inputs[1]) or ()) != [-1]:
            return None
    square = values[-2].producer() if values[-2] is not None else None
    if square is None or eps is None or eps.size != 1 or any(value is not x for value in square.inputs):
        return None
    return float(eps)


def skip_normalization(edit: Editor, node: ir.Node) -> bool:
    """Residual addition and RMS normalization in one node."""
    if node.op_type != "RMSNormalization" or node.attributes.get_int("axis", -1) != -1:
        return False
    total = node.inputs[0]
    shape = shape_of(total)
    if total is None or shape is None or len(shape) not in (2, 3):
        return False
    add = producer(total, "Add")
    if add is not None and shape_of(add.inputs[0]) == shape_of(add.inputs[1]):
        terms = [add.inputs[0], add.inputs[1]]
    elif producer(total, "Concat") is not None and None not in shape:
        # Main rows joined by stream rows: the kernel all other layers use, with nothing to add, because another one
        # rounds differently and a row must not depend on the schedule.
        add, terms = None, [total, edit.constant(np.zeros([size or 0 for size in shape], np.float32))]
    else:
        return False
    norm = edit.insert(
        node,
        SKIP_NORM,
        [*terms, node.inputs[1]],
        shape_of(node.outputs[0]),
        node.outputs[0].dtype,
        {"epsilon": node.attributes.get_float("epsilon", 1e-5)},
        CONTRIB,
        outputs=4,
    )
    if add is None:
        edit.replace(node, norm)
        return True
    made = norm.producer()
    assert made is not None
    made.outputs[3].shape, made.outputs[3].type = total.shape, total.type
    # The sum must exist before its other users, which may stand before this normalization.
    edit.graph.remove(made)
    edit.graph.insert_before(add, made)
    edit.replace_value(total, made.outputs[3])
    edit.replace(node, norm)
    return True


def argmax_as_topk(edit: Editor, node: ir.Node) -> bool:
    """ONNX Runtime's TopK of one takes half the time of its ArgMax; ties go to the lowest index in both."""
    source = node.inputs[0]
    shape = shape_of(source)
    if (
        node.op_type != "ArgMax"
        or source is None
        or shape is None
        or None in shape
        or source.dtype != ir.DataType.FLOAT
    ):
        return False
    if node.attributes.get_int("axis", 0) not in (-1, len(shape) - 1) or (shape[-1] or 0) < VOCABULARY:
        return False
    best = _top_k(edit, node, source, (*shape[:-1], 1))
    keep = node.attributes.get_int("keepdims", 1)
    edit.replace(node, best if keep else edit.reshape(node, best, shape[:-1]))
    return True


def rounds_as_topk(edit: Editor, node: ir.Node) -> bool:
    """k rounds of argmax, each with the earlier winners masked out, are one TopK."""
    if node.op_type != "Concat" or len(node.inputs) < 2 or node.attributes.get_int("axis") not in (1, -1):
        return False
    scores: list[ir.Value | None] = []
    for value in node.inputs:
        at: ir.Value | None = value
        while (above := at.producer() if at is not None else None) is not None and above.op_type in ("Reshape", "Cast"):
            at = above.inputs[0]
        if above is None or above.op_type != "ArgMax":
            return False
        scores.append(above.inputs[0])
    for i, value in enumerate(scores[1:]):
        masked = producer(value, "Where")
        taken = producer(masked.inputs[0], "Equal") if masked is not None else None
        if masked is None or taken is None or masked.inputs[2] is not scores[i] or node.inputs[i] not in taken.inputs:
            return False
    source, shape, kind = scores[0], shape_of(scores[0]), node.outputs[0].dtype
    if source is None or shape is None or len(shape) != 2 or kind is None:
        return False
    best = _top_k(edit, node, source, (shape[0], len(scores)))
    edit.replace(node, edit.insert(node, "Cast", [best], (shape[0], len(scores)), kind, {"to": int(kind)}))
    return True


def _top_k(edit: Editor, before: ir.Node, source: ir.Value, shape: Shape) -> ir.Value:
    k = edit.ints(shape[-1] or 1)
    values = edit.insert(before, "TopK", [source, k], shape, source.dtype, {"axis": -1}, outputs=2)
    made = values.producer()
    assert made is not None
    ids = made.outputs[1]
    ids.shape, ids.type = ir.Shape(list(shape)), ir.TensorType(ir.DataType.INT64)
    return ids


SIMPLIFY: tuple[Rule, ...] = (
    views_as_reshapes,
    joined_reshapes,
    joined_transposes,
    gathers_first,
    one_gather_of_rows,
    sliced_tables,
    rounds_as_topk,
)
FUSE: tuple[Rule, ...] = (skip_normalization, argmax_as_topk)
FINISH: tuple[Rule, ...] = (views_as_reshapes, joined_reshapes)
"""For a graph whose linears have been lowered."""


def apply(edit: Editor, rules: Sequence[Rule]) -> None:
    """Apply rules until none changes anything, then drop what nobody uses."""
    changed = True
    while changed:
        changed = False
        for node in list(edit.graph):
            if node.graph is None:
                continue
            for rule in rules:
                if rule(edit, node):
                    changed = True
                    break
        clean(edit.model)


def finish(edit: Editor, more: Sequence[Rule] = ()) -> None:
    """Rewrites of a graph whose linears have been lowered; products and the main rows' logits get their names.

    ``more``: further rules, for graphs whose views are merged.
    """
    apply(edit, FINISH)
    apply(edit, more)
    for product in edit.products:
        if not product.output.is_graph_output():
            product.output.name = f"{product.weight}{READS}{product.source.name}"
    for node in edit.graph:
        if node.op_type in ("ArgMax", "TopK"):
            logits = node.inputs[0]
            assert logits is not None
            if READS in (logits.name or ""):  # the name can be had once; what it said is known of the logits
                heads = [product for product in edit.products if product.output is logits]
                heads[0].source.name = f"{heads[0].weight}{READS}{LOGITS}"
            logits.name = LOGITS
            return


def simplify(edit: Editor, more: Sequence[Rule] = ()) -> None:
    """All rewrites that need no choice, in place; ``more``: further rules for graphs whose views are merged."""
    apply(edit, (rms_normalization,))
    apply(edit, SIMPLIFY)
    apply(edit, (*more, *SIMPLIFY))
    apply(edit, FUSE)
