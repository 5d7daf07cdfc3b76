"""Rewrites of views, transposes and gathers of ONNX graphs.

Each is a rule: it changes the graph at a node and says whether it did. Values stay as they are, in every bit.
"""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import Editor, constant_of, producer, role_of, shape_of, sizes_of, source_of


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
    """A transpose of a transpose."""
    if node.op_type != "Transpose":
        return False
    perm = list(node.attributes["perm"].as_ints())
    source = source_of(node)
    inner = producer(source, "Transpose")
    if inner is not None:
        first = inner.attributes["perm"].as_ints()
        both = [first[d] for d in perm]
        origin = source_of(inner)
        edit.replace(node, origin if both == sorted(both) else edit.transpose(node, origin, both))
        return True
    return False


def gathers_first(edit: Editor, node: ir.Node) -> bool:
    """A gather of rows after a transpose or reshape becomes one before it, where rows of all layers look alike."""
    if node.op_type != "Gather":
        return False
    source, index = source_of(node), source_of(node, 1)
    axis = node.attributes.get_int("axis", 0)
    picked, shape = sizes_of(index), sizes_of(source)
    if picked is None or len(picked) != 1 or shape is None:
        return False
    content = constant_of(index)
    if content is not None and np.array_equal(content, np.arange(shape[axis])):
        edit.replace(node, source)
        return True
    above = source.producer()
    if above is None or above.op_type not in ("Transpose", "Reshape") or (inner := sizes_of(above.inputs[0])) is None:
        return False
    if above.op_type == "Transpose":
        at = above.attributes["perm"].as_ints()[axis]
    else:
        same = (d for d, size in enumerate(inner) if size == shape[axis] and prod(inner[:d]) == prod(shape[:axis]))
        at = next(same, -1)
        if at < 0:
            return False
    rows = (*inner[:at], *picked, *inner[at + 1 :])
    got = edit.insert(node, "Gather", [above.inputs[0], index], rows, source.dtype, {"axis": at})
    if above.op_type == "Transpose":
        edit.replace(node, edit.transpose(node, got, above.attributes["perm"].as_ints()))
    else:
        edit.replace(node, edit.reshape(node, got, (*shape[:axis], *picked, *shape[axis + 1 :])))
    return True


def one_gather_of_rows(edit: Editor, node: ir.Node) -> bool:
    """The accepted path's rows of every layer, gathered one by one and joined, become one gather of the joined rows."""
    if node.op_type != "Concat" or node.attributes.get_int("axis") != 0 or len(node.inputs) < 2:
        return False
    sources, index = [], None
    for value in node.inputs:
        view = producer(value, "Reshape")
        gather = producer(view.inputs[0] if view is not None else value, "Gather")
        if gather is None or (index is not None and gather.inputs[1] is not index):
            return False
        index, source = gather.inputs[1], source_of(gather)
        shape, rows, whole = sizes_of(source), shape_of(index), shape_of(value)
        axis = gather.attributes.get_int("axis", 0)
        if shape is None or whole is None or len(whole) != 3 or rows is None or len(rows) != 1:
            return False
        if whole[0] != 1 or prod(shape[:axis]) != 1 or prod(shape[axis + 1 :]) != whole[2]:
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
    whole, shape = source_of(gather), shape_of(node.inputs[0])
    table = constant_of(whole)
    start, end, axis, step = (int(b.item()) for b in bounds if b is not None)
    if table is None or table.ndim != 2 or shape is None or axis % len(shape) != len(shape) - 1:
        return False
    columns = table[:, start:end:step]
    cut = edit.named(f"{whole.name}:{start}:{end}:{step}", partial(np.ascontiguousarray, columns), role_of(whole))
    out = shape_of(node.outputs[0])
    edit.replace(node, edit.insert(node, "Gather", [cut, gather.inputs[1]], out, cut.dtype, {"axis": 0}))
    return True
