"""Rewrites of exported ONNX graphs: fewer nodes for the same numbers.

On small models a node costs as much as its arithmetic, so views are merged, gathers of the accepted path are moved to
one place, and linears that read the same input become one product. Every rewrite keeps the values it replaces exactly,
up to the order of the columns inside a merged product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import Editor, producer, shape_of, sizes_of, source_of
from ssdevice.export.onnx.views import (
    gathers_first,
    joined_reshapes,
    joined_transposes,
    one_gather_of_rows,
    sliced_tables,
)
from ssdevice.runtime.onnx.kernels import ADD_NORM, DOMAIN

Rule = Callable[[Editor, ir.Node], bool]


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
    epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    outputs = [(shape, total.dtype)] * 2
    made = edit.insert_several(add or node, ADD_NORM, [*terms, node.inputs[1]], outputs, epsilon, DOMAIN)
    if add is not None:
        edit.replace_value(total, made[1])
    edit.replace(node, made[0])
    return True


SIMPLIFY: tuple[Rule, ...] = (
    joined_reshapes,
    joined_transposes,
    gathers_first,
    one_gather_of_rows,
    sliced_tables,
)
FUSE: tuple[Rule, ...] = (skip_normalization,)
FINISH: tuple[Rule, ...] = (joined_reshapes,)
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


def simplify(edit: Editor) -> None:
    """All rewrites that need no choice, in place."""
    for rules in (SIMPLIFY, FUSE):
        apply(edit, rules)
