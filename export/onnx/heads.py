"""The order of attention's heads in graphs.

Grouped attention wants the heads of queries by (group member, key head); models give them by (key head, group member).
Between a linear and the attention stand only operations that treat every head alike, so the linear's columns can be
permuted once, at export.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import Editor, constant_of, producer, role_of, shape_of
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
        if node.op_type in ("Concat", "Slice"):
            return self._by_rows(node, len(shape)) and all(
                self.add(item) for item in (node.inputs if node.op_type == "Concat" else node.inputs[:1])
            )
        return False

    def _by_rows(self, node: ir.Node, rank: int) -> bool:
        if node.op_type == "Concat":
            axes = [node.attributes.get_int("axis", 0)]
        else:
            content = constant_of(node.inputs[3]) if len(node.inputs) > 3 else None
            axes = [int(a) for a in content] if content is not None else []
        return bool(axes) and all(axis % rank == rank - 2 for axis in axes)

    def closed(self, last: ir.Node) -> bool:
        """Whether nothing else reads what these nodes make."""
        inside = {*self.nodes, *self.linears, last}
        return all(use.node in inside for node in (*self.nodes, *self.linears) for use in node.outputs[0].uses())


def permuted_heads(edit: Editor, node: ir.Node) -> bool:
    """A swap of (key head, group member) at run time becomes one in the weights."""
    if node.op_type != "Transpose" or tuple(node.attributes["perm"].as_ints()) != SWAP:
        return False
    view = producer(node.inputs[0], "Reshape")
    shape = shape_of(node.inputs[0])
    if view is None or shape is None or None in shape or len(shape) != 4 or node.outputs[0].is_graph_output():
        return False
    _, kv_heads, groups, dim = (size or 0 for size in shape)
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
    edit.replace(node, edit.reshape(node, view.inputs[0], shape_of(node.outputs[0]) or ()))  # type: ignore[arg-type]
    return True


def _permuted(edit: Editor, value: ir.Value, content: Array, heads: tuple[int, int, int]) -> ir.Value:
    name = f"{value.name}{SUFFIX}"
    known = edit.graph.initializers.get(name)
    if known is not None:
        return known
    rest = content.shape[1:]
    swapped = content.reshape(*heads, *rest).swapaxes(0, 1).reshape(-1, *rest)
    role = role_of(value)
    return edit.constant(np.ascontiguousarray(swapped), name, role and replace(role, permuted=True))
