"""Low-rank pairs of a traced graph become slots: graph inputs that an app's adapter is bound to.

A pair beside a linear of the base, ``base(x) + up(down(x))``, joins the product its linear belongs
to: one ``down`` for q/k/v or gate/up together, then an ``up`` for each. A pair without a linear
beside it is two products.

**Equal bits for one row and for several.** Plain decoding runs one row, a step runs T, and both
must give the same numbers, because an ulp before the next quantization is a whole level after it.
ONNX Runtime's float MatMul does not promise that: for one row it takes another kernel, which sums
in another order, and for several rows and threads it cuts the inputs into blocks by how many
columns a thread got. So in quantized graphs a pair beside a linear is one operator of ours,
``LowRank1`` to ``LowRank3``, whose ``down`` is a product of integers, exact in any order. An ``up``
apart takes its one row transposed, as a column: FusedMatMul with ``transA`` has no kernel for one
row and uses the one for several. Its inner size is the rank, which fits one block up to 128.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ssdevice.adapters.slots import Slot, SlotKind
from ssdevice.contract import TensorSpec
from ssdevice.export.onnx.editor import (
    CONTRIB,
    Editor,
    constant_of,
    only_user,
    producer,
    role_of,
    shape_of,
    source_of,
)
from ssdevice.export.onnx.functions import row_form
from ssdevice.export.onnx.linears import LINEAR, Linear, Term
from ssdevice.export.weights import Role
from ssdevice.runtime.onnx.kernels import DOMAIN, LOW_RANK


@dataclass
class SlotBook:
    """The slots of a variant's graphs. ``exact``: one row must give the bits of several."""

    exact: bool
    slots: dict[str, Slot] = field(default_factory=dict)

    def terms(self, edit: Editor) -> dict[ir.Node, Term]:
        """By a linear's placeholder: the low-rank term beside it."""
        found = {}
        for up in edit.graph:
            if (side := side_of(up)) is None or not side.up:
                continue
            down = producer(up.inputs[0], LINEAR)
            add = only_user(up.outputs[0], "Add")
            if (
                down is None or side_of(down) is None or add is None
            ):  # an activation is between them, or no linear
                continue
            for base in (producer(value, LINEAR) for value in add.inputs):
                if base is None or base is up or side_of(base) is not None:
                    continue
                if base.inputs[0] is down.inputs[0] and len(base.outputs[0].uses()) == 1:
                    found[base] = side, add
        return found

    def slot(self, linear: Linear, int8: bool) -> Slot | None:
        """The slot beside a linear of the base; None if no part of it has one."""
        beside = [part.term[0] if part.term is not None else None for part in linear.parts]
        if len(kinds := {side.kind for side in beside if side is not None}) > 1:
            raise ValueError(f"{linear.name} has slots of two kinds")
        sources = tuple(side.source if side is not None else "" for side in beside)
        outputs = tuple(int(part.weight.shape[0]) for part in linear.parts)
        return (
            self.keep(Slot(kinds.pop(), sources, linear.inputs, outputs, int8)) if kinds else None
        )

    def keep(self, slot: Slot) -> Slot:
        if self.slots.setdefault(slot.name, slot) != slot:
            raise ValueError(f"slot {slot.name} has two forms in the graphs")
        return slot


def side_of(node: ir.Node) -> Role | None:
    """The role of a placeholder whose weight is a factor; None for other nodes."""
    role = role_of(node.inputs[1]) if node.op_type == LINEAR else None
    return role if role is not None and role.factor else None


def graph_input(edit: Editor, tensor: TensorSpec) -> ir.Value:
    """The graph's input of this name, added if it is not there."""
    value = next((known for known in edit.graph.inputs if known.name == tensor.name), None)
    if value is None:
        value = ir.val(tensor.name, ir.DataType.from_numpy(np.dtype(tensor.dtype)), tensor.shape)
        edit.graph.inputs.append(value)
    return value


def beside(
    edit: Editor, slot: Slot, base: ir.Value, x: ir.Value, before: ir.Node, exact: bool
) -> ir.Value:
    """``base + up(down(x))`` of every part, side by side: one operator if the slot is int8."""
    if slot.int8:
        zero, form = row_form(edit, x)
        factor, scale, *rest = (graph_input(edit, tensor) for tensor in slot.tensors)
        kind = LOW_RANK[len(slot.outputs) - 1]
        inputs = [base, x, factor, scale, zero, *rest]
        return edit.insert(before, kind, inputs, shape_of(base), ir.DataType.FLOAT, form, DOMAIN)
    term = up(edit, slot, down(edit, slot, x, before, exact), before, exact)
    return edit.insert(before, "Add", [base, term], shape_of(base), ir.DataType.FLOAT)


def down(edit: Editor, slot: Slot, x: ir.Value, before: ir.Node, exact: bool) -> ir.Value:
    """``x @ down``."""
    single = _single(x, exact)
    column = _column(edit, x, before) if single else x
    return _product(edit, column, graph_input(edit, slot.down), None, before, single)


def up(edit: Editor, slot: Slot, h: ir.Value, before: ir.Node, exact: bool) -> ir.Value:
    """``h @ up`` of every part, side by side."""
    single = _single(h, exact)
    lead = _lead(h)
    pieces = [_column(edit, h, before) if single else h]
    if len(slot.outputs) > 1:
        ranks = graph_input(edit, slot.ranks)
        shape = (*lead[:-1], None, 1) if single else (*lead, None)
        axis = len(lead) - 1 if single else len(lead)
        pieces = list(edit.split(before, pieces[0], ranks, [shape] * len(slot.outputs), axis))
    made = [
        _product(edit, piece, graph_input(edit, spec), outputs, before, single)
        for piece, outputs, spec in zip(pieces, slot.outputs, slot.ups, strict=True)
    ]
    if len(made) == 1:
        return made[0]
    return edit.insert(
        before, "Concat", made, (*lead, sum(slot.outputs)), ir.DataType.FLOAT, {"axis": -1}
    )


def _lead(value: ir.Value) -> tuple[int, ...]:
    if (shape := shape_of(value)) is None or None in shape[:-1]:
        raise ValueError(f"the rows of {value.name} are not static: {shape}")
    return tuple(size or 0 for size in shape[:-1])


def _single(x: ir.Value, exact: bool) -> bool:
    """Whether ``x`` is one row that must have the bits it has among several."""
    return exact and all(size == 1 for size in _lead(x))


def _column(edit: Editor, x: ir.Value, before: ir.Node) -> ir.Value:
    """One row ``[.., 1, K]`` as ``[.., K, 1]``."""
    lead = _lead(x)
    shape = shape_of(x)
    assert shape is not None
    target = edit.ints(*lead[:-1], -1, 1)
    return edit.insert(
        before, "Reshape", [x, target], (*lead[:-1], shape[-1], 1), ir.DataType.FLOAT
    )


def _product(
    edit: Editor, x: ir.Value, weight: ir.Value, outputs: int | None, before: ir.Node, single: bool
) -> ir.Value:
    """``x [.., K] @ weight [K, N]``; ``single``: x is one row as a column."""
    lead = (*(shape_of(x) or ())[:-2], 1) if single else _lead(x)
    kind, form, domain = (
        ("FusedMatMul", {"transA": 1, "transB": 0}, CONTRIB) if single else ("MatMul", {}, "")
    )
    return edit.insert(before, kind, [x, weight], (*lead, outputs), ir.DataType.FLOAT, form, domain)


def lower_alone(edit: Editor, book: SlotBook) -> None:
    """Every factor that is left once the base's linears are lowered becomes a product with a graph
    input.
    """
    sides = [(node, side_of(node)) for node in edit.graph]
    nodes = [(node, side) for node, side in sides if side is not None]
    shapes: dict[tuple[SlotKind, str, bool], tuple[int, ...]] = {}
    for node, side in nodes:
        weight = constant_of(node.inputs[1])
        assert weight is not None
        shapes[side.kind, side.source, side.up] = weight.shape
    for node, side in nodes:
        inputs = shapes[side.kind, side.source, False][1]
        outputs = shapes[side.kind, side.source, True][0]
        slot = book.keep(Slot(side.kind, (side.source,), inputs, (outputs,)))
        x = source_of(node)
        made = (up if side.up else down)(edit, slot, x, node, book.exact)
        shape = made.shape
        edit.replace(node, made)
        made.shape = shape  # the rank is the app's, not the one that was traced
