"""What each operator of torch in a traced module becomes in ONNX; ``forms`` has the project's
own.

A translation gets the ``Editor`` of the graph that is being written, what the operator gives
(``Out``), and the operator's own arguments: tensors as graph values, everything else as Python
values. It appends nodes and returns the value. Operators on constants only never get here: they are
computed while tracing (``tracing``).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch

from ssdevice.export.onnx.editor import (
    Editor,
    Shape,
    constant_of,
    producer,
    shape_of,
    sizes_of,
    source_of,
)

aten = torch.ops.aten
VOCABULARY = 256
"""An argmax over fewer values is not worth a TopK."""
Operand = ir.Value | int | float | bool


class Out(NamedTuple):
    """Shape (None: the dynamic size) and element type of an operator's result; of the first one if
    it has several.
    """

    shape: Shape
    dtype: ir.DataType


Translation = Callable[..., Any]
"""``translation(edit, out, *the operator's arguments)``."""


def _chain(*kinds: str) -> Translation:
    """An operator of one tensor as nodes of one input, one after the other."""

    def translate(edit: Editor, out: Out, x: ir.Value) -> ir.Value:
        for kind in kinds:
            x = edit.insert(None, kind, [x], out.shape, out.dtype)
        return x

    return translate


def _binary(kind: str) -> Translation:
    """Element by element; operands get the element type that torch computes in."""

    def translate(edit: Editor, out: Out, x: Operand, y: Operand) -> ir.Value:
        return edit.insert(None, kind, _same_type(edit, out, x, y), out.shape, out.dtype)

    return translate


def _same_type(edit: Editor, out: Out, *operands: Operand) -> list[ir.Value]:
    kind = out.dtype
    if kind is ir.DataType.BOOL:  # a comparison
        kinds = {item.dtype for item in operands if isinstance(item, ir.Value)}
        kind = next(
            (
                item
                for item in (ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32)
                if item in kinds
            ),
            kind,
        )
    return [
        cast(edit, Out(shape_of(item) or (), kind), item)
        if isinstance(item, ir.Value)
        else number(edit, item, kind)
        for item in operands
    ]


def number(edit: Editor, content: float, kind: ir.DataType) -> ir.Value:
    """A constant without dimensions."""
    return edit.constant(np.array(content, kind.numpy()))


def view(edit: Editor, out: Out, x: ir.Value, *_: object) -> ir.Value:
    return edit.reshape(None, x, out.shape)


def same(edit: Editor, out: Out, x: ir.Value, *_: object, **__: object) -> ir.Value:
    return x


def cast(edit: Editor, out: Out, x: ir.Value, *_: object, **__: object) -> ir.Value:
    return (
        x
        if x.dtype is out.dtype
        else edit.insert(None, "Cast", [x], shape_of(x), out.dtype, {"to": int(out.dtype)})
    )


def transpose(edit: Editor, out: Out, x: ir.Value, first: int, second: int) -> ir.Value:
    perm = list(range(len(out.shape)))
    perm[first], perm[second] = perm[second], perm[first]
    return edit.transpose(None, x, perm)


def expand(edit: Editor, out: Out, x: ir.Value, *_: object, **__: object) -> ir.Value:
    """Repeat sizes of one; the dynamic size may only stay as it is."""
    return edit.insert(
        None, "Expand", [x, edit.ints(*(size or 1 for size in out.shape))], out.shape, out.dtype
    )


def cat(edit: Editor, out: Out, parts: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """Joined along a dimension; what is empty is left out."""
    parts = [part for part in parts if 0 not in (shape_of(part) or ())]
    if len(parts) == 1:
        return parts[0]
    axis = dim % len(out.shape)
    rows = _path_rows(edit, out, parts) if axis == 0 else None
    return rows or edit.insert(None, "Concat", parts, out.shape, out.dtype, {"axis": axis})


def _path_rows(edit: Editor, out: Out, parts: Sequence[ir.Value]) -> ir.Value | None:
    """The accepted path's rows of every layer, gathered one by one, as one gather of all rows;
    None: other parts.
    """
    gathers = [producer(part, "Gather") for part in parts]
    paths = {
        node.inputs[1] if node and node.attributes.get_int("axis", 0) == 1 else None
        for node in gathers
    }
    if None in paths or len(paths) > 1:
        return None
    rows = [source_of(node) for node in gathers if node]
    joined = edit.insert(
        None, "Concat", rows, (len(rows), *(shape_of(rows[0]) or ())[1:]), out.dtype, {"axis": 0}
    )
    return edit.insert(None, "Gather", [joined, *paths], out.shape, out.dtype, {"axis": 1})


def stack(edit: Editor, out: Out, parts: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    axis = dim % len(out.shape)
    one = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
    return cat(edit, out, [edit.reshape(None, part, one) for part in parts], axis)


def gather(edit: Editor, out: Out, x: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    """Rows of a dimension by their numbers; of what a view shows, so that views on both sides can
    join.
    """
    shape = shape_of(x) or ()
    content = constant_of(index)
    above = x.producer()
    axis = dim % len(shape)
    if content is not None and np.array_equal(content, np.arange(shape[axis] or 0)):
        return x
    inner = (
        sizes_of(above.inputs[0]) if above is not None and len(out.shape) == len(shape) else None
    )
    if above is not None and inner is not None and above.op_type == "Transpose":
        perm = above.attributes["perm"].as_ints()
        own = Out(tuple(out.shape[perm.index(d)] for d in range(len(perm))), out.dtype)
        return edit.transpose(None, gather(edit, own, source_of(above), perm[axis], index), perm)
    if above is not None and inner is not None and above.op_type == "Reshape":
        for d, size in enumerate(inner):
            if size == shape[axis] and prod(inner[:d]) == prod(size or 0 for size in shape[:axis]):
                own = Out((*inner[:d], out.shape[axis], *inner[d + 1 :]), out.dtype)
                return edit.reshape(None, gather(edit, own, source_of(above), d, index), out.shape)
    return edit.insert(None, "Gather", [x, index], out.shape, out.dtype, {"axis": axis})


def embedding(edit: Editor, out: Out, table: ir.Value, ids: ir.Value, *_: object) -> ir.Value:
    return gather(edit, out, table, 0, ids)


def select(edit: Editor, out: Out, x: ir.Value, dim: int, index: int) -> ir.Value:
    """One element of a dimension, which goes."""
    if (shape_of(x) or ())[dim] == 1:
        return view(edit, out, x)
    return gather(edit, out, x, dim, edit.constant(np.array(index, np.int64)))


def repeat(edit: Editor, out: Out, x: ir.Value, repeats: int, dim: int) -> ir.Value:
    """Every element of a dimension several times over."""
    return gather(
        edit, out, x, dim, edit.ints(*np.arange((shape_of(x) or ())[dim] or 0).repeat(repeats))
    )


def cut(
    edit: Editor,
    out: Out,
    x: ir.Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> ir.Value:
    last = np.iinfo(np.int64).max if end is None else end
    bounds = [edit.ints(value) for value in (start or 0, int(last), dim % len(out.shape), step)]
    return edit.insert(None, "Slice", [x, *bounds], out.shape, out.dtype)


def split(edit: Editor, out: Out, x: ir.Value, size: int, dim: int = 0) -> Sequence[ir.Value]:
    """Pieces of ``size``, the last one smaller if need be."""
    axis = dim % len(out.shape)
    whole = (shape_of(x) or ())[axis] or 0
    widths = [min(size, whole - at) for at in range(0, whole, size)]
    shapes = [(*out.shape[:axis], width, *out.shape[axis + 1 :]) for width in widths]
    return edit.split(None, x, edit.ints(*widths), shapes, axis)


def chunk(edit: Editor, out: Out, x: ir.Value, count: int, dim: int = 0) -> Sequence[ir.Value]:
    return split(edit, out, x, -(-((shape_of(x) or ())[dim] or 0) // count), dim)


def where(edit: Editor, out: Out, condition: ir.Value, x: Operand, y: Operand) -> ir.Value:
    return edit.insert(
        None, "Where", [condition, *_same_type(edit, out, x, y)], out.shape, out.dtype
    )


def power(edit: Editor, out: Out, x: ir.Value, exponent: float = 2) -> ir.Value:
    kind, by = ("Mul", x) if exponent == 2 else ("Pow", number(edit, exponent, out.dtype))
    return edit.insert(None, kind, [x, by], out.shape, out.dtype)


def silu(edit: Editor, out: Out, x: ir.Value) -> ir.Value:
    return edit.insert(
        None,
        "Mul",
        [x, edit.insert(None, "Sigmoid", [x], out.shape, out.dtype)],
        out.shape,
        out.dtype,
    )


def gelu(edit: Editor, out: Out, x: ir.Value, approximate: str = "none") -> ir.Value:
    return edit.insert(None, "Gelu", [x], out.shape, out.dtype, {"approximate": approximate})


def clamp(
    edit: Editor, out: Out, x: ir.Value, low: float | None = None, high: float | None = None
) -> ir.Value:
    bounds = [None if bound is None else number(edit, bound, out.dtype) for bound in (low, high)]
    return edit.insert(None, "Clip", [x, *bounds], out.shape, out.dtype)


def mean(edit: Editor, out: Out, x: ir.Value, dims: Sequence[int], keep: bool = False) -> ir.Value:
    return edit.insert(
        None, "ReduceMean", [x, edit.ints(*dims)], out.shape, out.dtype, {"keepdims": int(keep)}
    )


def layer_norm(
    edit: Editor,
    out: Out,
    x: ir.Value,
    sizes: Sequence[int],
    scale: ir.Value | None = None,
    bias: ir.Value | None = None,
    eps: float = 1e-5,
    *_: object,
) -> ir.Value:
    weight = edit.constant(np.ones(tuple(sizes), np.float32)) if scale is None else scale
    terms = [x, weight, bias] if bias is not None else [x, weight]
    return edit.insert(
        None,
        "LayerNormalization",
        terms,
        out.shape,
        out.dtype,
        {"axis": -len(sizes), "epsilon": eps},
    )


def rms_norm(
    edit: Editor, out: Out, x: ir.Value, sizes: Sequence[int], scale: ir.Value, eps: float
) -> ir.Value:
    form = {"axis": -len(sizes), "epsilon": eps}
    return edit.insert(None, "RMSNormalization", [x, scale], out.shape, out.dtype, form)


def largest(edit: Editor, x: ir.Value, k: int) -> ir.Value:
    """Where the k largest values of the last dimension are, among equals the lowest index first,
    before a view.
    """
    if (view := producer(x, "Reshape")) and (shape_of(view.inputs[0]) or (0,))[-1] == (
        shape_of(x) or ()
    )[-1]:
        x = source_of(view)
    shape = (*(shape_of(x) or ())[:-1], k)
    outputs = [(shape, x.dtype), (shape, ir.DataType.INT64)]
    return edit.insert_several(None, "TopK", [x, edit.ints(k)], outputs, {"axis": -1})[1]


def argmax(edit: Editor, out: Out, x: ir.Value, dim: int, keep: bool = False) -> ir.Value:
    """The lowest index among equals.

    ONNX Runtime's TopK of one takes half the time of its ArgMax for a vocabulary.
    """
    if dim == -1 and ((shape_of(x) or ())[-1] or 0) >= VOCABULARY:
        return edit.reshape(None, largest(edit, x, 1), out.shape)
    return edit.insert(
        None, "ArgMax", [x], out.shape, out.dtype, {"axis": dim, "keepdims": int(keep)}
    )


def size(edit: Editor, out: Out, x: ir.Value, dim: int) -> ir.Value:
    """A size that is known at run time only, as a number."""
    found = edit.insert(None, "Shape", [x], (1,), ir.DataType.INT64, {"start": dim, "end": dim + 1})
    return edit.reshape(None, found, ())


def arange(edit: Editor, out: Out, end: ir.Value, **_: object) -> ir.Value:
    """0, 1, .. up to a size that is known at run time only."""
    bounds = [
        number(edit, 0, out.dtype),
        cast(edit, Out((), out.dtype), end),
        number(edit, 1, out.dtype),
    ]
    return edit.insert(None, "Range", bounds, out.shape, out.dtype)


TRANSLATIONS: dict[Callable[..., Any], Translation] = {
    # Views
    **dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default),
        view,
    ),
    **dict.fromkeys((aten.dropout.default, aten.contiguous.default, aten.alias.default), same),
    aten.transpose.int: transpose,
    aten.expand.default: expand,
    # Rows
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.index_select.default: gather,
    aten.embedding.default: embedding,
    aten.select.int: select,
    aten.repeat_interleave.self_int: repeat,
    aten.slice.Tensor: cut,
    aten.split.Tensor: split,
    aten.chunk.default: chunk,
    # Element by element
    **dict.fromkeys((aten.to.dtype, aten.type_as.default), cast),
    aten.add.Tensor: _binary("Add"),
    aten.sub.Tensor: _binary("Sub"),
    aten.mul.Tensor: _binary("Mul"),
    aten.div.Tensor: _binary("Div"),
    aten.eq.Tensor: _binary("Equal"),
    aten.__and__.Tensor: _binary("And"),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _binary("Less")),
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _binary("LessOrEqual")),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _binary("GreaterOrEqual")),
    **dict.fromkeys(
        (aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther), where
    ),
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.square.default), power),
    aten.rsqrt.default: _chain("Sqrt", "Reciprocal"),
    aten.silu.default: silu,
    aten.gelu.default: gelu,
    aten.clamp_.default: clamp,
    aten.neg.default: _chain("Neg"),
    aten.tanh.default: _chain("Tanh"),
    aten.relu.default: _chain("Relu"),
    # Over a dimension
    aten.matmul.default: _binary("MatMul"),
    aten.mean.dim: mean,
    aten.layer_norm.default: layer_norm,
    aten.rms_norm.default: rms_norm,
    aten.argmax.default: argmax,
    # The dynamic size
    aten.sym_size.int: size,
    aten.arange.default: arange,
}
