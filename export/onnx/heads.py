"""The order of attention's heads in graphs.

Grouped attention wants the heads of queries by (group member, key head); models give them by (key head, group member).
Only operations that treat all heads alike lie between a linear and the attention, so the linear's columns can be
permuted once, at export.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import Editor, constant_of, producer, role_of, shape_of, sizes_of, source_of
from ssdevice.export.onnx.linears import LINEAR, Array

SUFFIX = "~heads"
"""Ends the names of permuted weights."""
SWAP = (0, 2, 1, 3)


@dataclass
class _Walk:
    """Nodes between a head permutation and the linears that feed it."""

    width: int
    head_dim: int
    nodes: list[ir.Node] = field(default_factory=list)
    linears: list[ir.Node] = field(default_factory=list)

    def add(self, value: ir.Value | None) -> bool:
        """Whether everything that makes ``value`` treats heads alike, back to linears of the full width."""
        node = value.producer() if value is not None else None
        if node is None:
            return False
        if node in self.nodes or node in self.linears:
            return True
        if node.op_type == LINEAR:
            weight = shape_of(node.inputs[1])
            self.linears.append(node)
            return weight is not None and weight[0] == self.width
        shape = shape_of(node.outputs[0])
        if shape is None:
            return False
        self.nodes.append(node)
        if node.op_type in ("Reshape", "RotaryEmbedding"):
            return self.add(node.inputs[0])
        if node.op_type == "RMSNormalization":
            # Over one head at a time it has one weight for all heads; over all heads at once the weight is in order.
            return shape[-1] == self.head_dim and self.add(node.inputs[0])
        if node.op_type == "Add":
            return all(self.add(item) for item in node.inputs)
        rows = len(shape) - 2
        if node.op_type == "Concat":
            return node.attributes.get_int("axis", 0) % len(shape) == rows and all(map(self.add, node.inputs))
        if node.op_type == "Slice":
            axes = constant_of(node.inputs[3]) if len(node.inputs) > 3 else None
            return axes is not None and set(axes % len(shape)) == {rows} and self.add(node.inputs[0])
        return False

    def closed(self, last: ir.Node) -> bool:
        """Whether nothing else reads what these nodes make."""
        inside = {*self.nodes, *self.linears, last}
        return all(use.node in inside for node in (*self.nodes, *self.linears) for use in node.outputs[0].uses())


def permuted_heads(edit: Editor, node: ir.Node) -> bool:
    """A swap of (key head, group member) at run time becomes one in the weights."""
    if node.op_type != "Transpose" or tuple(node.attributes["perm"].as_ints()) != SWAP:
        return False
    view = producer(node.inputs[0], "Reshape")
    shape, out = sizes_of(node.inputs[0]), sizes_of(node.outputs[0])
    if view is None or shape is None or len(shape) != 4 or out is None or node.outputs[0].is_graph_output():
        return False
    _, kv_heads, groups, dim = shape
    whole = shape_of(view.inputs[0])
    if whole is None or whole[-1] not in (kv_heads * groups * dim, dim):
        return False
    walk = _Walk(kv_heads * groups * dim, dim)
    if not walk.add(node.inputs[0]) or not walk.closed(node):
        return False
    for linear in walk.linears:
        for place, value in enumerate(linear.inputs[1:], start=1):
            content = constant_of(value)
            if value is not None and content is not None:
                linear.replace_input_with(place, _permuted(edit, value, content, (kv_heads, groups, dim)))
    edit.replace(node, edit.reshape(node, source_of(view), out))
    return True


def _permuted(edit: Editor, value: ir.Value, content: Array, heads: tuple[int, int, int]) -> ir.Value:
    def swapped() -> Array:
        rest = content.shape[1:]
        return np.ascontiguousarray(content.reshape(*heads, *rest).swapaxes(0, 1).reshape(-1, *rest))

    role = role_of(value)
    return edit.named(f"{value.name}{SUFFIX}", swapped, role and replace(role, permuted=True))
