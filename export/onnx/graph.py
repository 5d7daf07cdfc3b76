"""Rewrites of exported ONNX graphs: fewer nodes for the same numbers.

On small models a node costs as much as its arithmetic, so views are merged, gathers of the accepted path are moved to
one place, and linears that read the same input become one product. Every rewrite keeps the values it replaces exactly,
up to the order of the columns inside a merged product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import (
    CONTRIB,
    SKIP_NORM,
    Editor,
    Shape,
    constant_of,
    producer,
    shape_of,
    sizes_of,
    source_of,
)
from ssdevice.export.onnx.views import (
    gathers_first,
    joined_reshapes,
    joined_transposes,
    one_gather_of_rows,
    sliced_tables,
    views_as_reshapes,
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
    total = source_of(node)
    shape, sizes = shape_of(total), sizes_of(total)
    if shape is None or len(shape) not in (2, 3):
        return False
    add = producer(total, "Add")
    if add is not None and shape_of(add.inputs[0]) == shape_of(add.inputs[1]):
        terms = [add.inputs[0], add.inputs[1]]
    elif producer(total, "Concat") is not None and sizes is not None:
        # Main rows joined by stream rows: the kernel all other layers use, with nothing to add, because another one
        # rounds differently and a row must not depend on the schedule.
        add, terms = None, [total, edit.constant(np.zeros(sizes, np.float32))]
    else:
        return False
    # The sum must exist before its other users, which may stand before this normalization.
    before, own = (add, (shape, total.dtype)) if add is not None else (node, (None, None))
    normed = (shape_of(node.outputs[0]), node.outputs[0].dtype)
    outputs = [normed, (None, None), (None, None), own]
    epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    made = edit.insert_several(before, SKIP_NORM, [*terms, node.inputs[1]], outputs, epsilon, CONTRIB)
    if add is not None:
        edit.replace_value(total, made[3])
    edit.replace(node, made[0])
    return True


def argmax_as_topk(edit: Editor, node: ir.Node) -> bool:
    """ONNX Runtime's TopK of one takes half the time of its ArgMax; ties go to the lowest index in both."""
    source = node.inputs[0]
    shape = sizes_of(source)
    if node.op_type != "ArgMax" or source is None or shape is None or source.dtype != ir.DataType.FLOAT:
        return False
    if node.attributes.get_int("axis", 0) not in (-1, len(shape) - 1) or shape[-1] < VOCABULARY:
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
    outputs = [(shape, source.dtype), (shape, ir.DataType.INT64)]
    return edit.insert_several(before, "TopK", [source, k], outputs, {"axis": -1})[1]


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
        edit.clean()


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
            logits = source_of(node)
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
