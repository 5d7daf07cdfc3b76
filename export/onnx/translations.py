"""What each operator of a traced module becomes in ONNX.

A translation gets the ``Editor`` of the graph that is being written, what the operator gives (``Out``), and the
operator's own arguments: tensors as graph values, everything else as Python values. It appends nodes and returns the
value. Operators on constants only never get here: they are computed while tracing (``tracing``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ssdevice.export import forms
from ssdevice.export.onnx.editor import CONTRIB, Editor, Shape, shape_of
from ssdevice.export.onnx.linears import LINEAR, LINEAR_DOMAIN

aten, own = torch.ops.aten, torch.ops.ssdevice
DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.bool: ir.DataType.BOOL,
}
Operand = ir.Value | int | float | bool


@dataclass(frozen=True)
class Out:
    """Shape (None: the dynamic size) and element type of an operator's result; of the first one if it has several."""

    shape: Shape
    dtype: ir.DataType


Translation = Callable[..., Any]
"""``translation(edit, out, *the operator's arguments)``."""


def _one(kind: str, **attributes: Any) -> Translation:
    """An operator of one tensor that is one node."""

    def translate(edit: Editor, out: Out, x: ir.Value) -> ir.Value:
        return edit.insert(None, kind, [x], out.shape, out.dtype, attributes)

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
        wide = (ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32)
        kind = next((item for item in wide if item in kinds), kind)
    return [
        cast(edit, Out(shape_of(item) or (), kind), item) if isinstance(item, ir.Value) else number(edit, item, kind)
        for item in operands
    ]


def number(edit: Editor, content: float, kind: ir.DataType) -> ir.Value:
    """A constant without dimensions."""
    return edit.constant(np.array(content, kind.numpy()))


def view(edit: Editor, out: Out, x: ir.Value, *_: object) -> ir.Value:
    """The same elements in another shape."""
    return edit.reshape(None, x, out.shape)


def same(edit: Editor, out: Out, x: ir.Value, *_: object, **__: object) -> ir.Value:
    """The value itself."""
    return x


def cast(edit: Editor, out: Out, x: ir.Value, *_: object, **__: object) -> ir.Value:
    """Another element type."""
    if x.dtype is out.dtype:
        return x
    return edit.insert(None, "Cast", [x], shape_of(x), out.dtype, {"to": int(out.dtype)})


def transpose(edit: Editor, out: Out, x: ir.Value, first: int, second: int) -> ir.Value:
    """Two dimensions change places."""
    perm = list(range(len(out.shape)))
    perm[first], perm[second] = perm[second], perm[first]
    return edit.transpose(None, x, perm)


def expand(edit: Editor, out: Out, x: ir.Value, *_: object, **__: object) -> ir.Value:
    """Repeat sizes of one; the dynamic size may only stay as it is."""
    return edit.insert(None, "Expand", [x, edit.ints(*(size or 1 for size in out.shape))], out.shape, out.dtype)


def cat(edit: Editor, out: Out, parts: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """Joined along a dimension; what is empty is left out."""
    parts = [part for part in parts if 0 not in (shape_of(part) or ())]
    if len(parts) == 1:
        return parts[0]
    return edit.insert(None, "Concat", parts, out.shape, out.dtype, {"axis": dim % len(out.shape)})


def stack(edit: Editor, out: Out, parts: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """Joined along a new dimension."""
    axis = dim % len(out.shape)
    one = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
    return cat(edit, out, [edit.reshape(None, part, one) for part in parts], axis)


def gather(edit: Editor, out: Out, x: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    """Rows of a dimension by their numbers."""
    return edit.insert(None, "Gather", [x, index], out.shape, out.dtype, {"axis": dim % len(shape_of(x) or ())})


def embedding(edit: Editor, out: Out, table: ir.Value, ids: ir.Value, *_: object) -> ir.Value:
    """Rows of a table."""
    return gather(edit, out, table, 0, ids)


def select(edit: Editor, out: Out, x: ir.Value, dim: int, index: int) -> ir.Value:
    """One element of a dimension, which goes."""
    return gather(edit, out, x, dim, edit.constant(np.array(index, np.int64)))


def repeat(edit: Editor, out: Out, x: ir.Value, repeats: int, dim: int) -> ir.Value:
    """Every element of a dimension several times over."""
    return gather(edit, out, x, dim, edit.ints(*np.arange((shape_of(x) or ())[dim] or 0).repeat(repeats)))


def cut(
    edit: Editor, out: Out, x: ir.Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ir.Value:
    """A range of a dimension."""
    axis = dim % len(out.shape)
    last = np.iinfo(np.int64).max if end is None else end
    bounds = [edit.ints(value) for value in (start or 0, int(last), axis, step)]
    return edit.insert(None, "Slice", [x, *bounds], out.shape, out.dtype)


def split(edit: Editor, out: Out, x: ir.Value, size: int, dim: int = 0) -> Sequence[ir.Value]:
    """Pieces of ``size``, the last one smaller if need be."""
    axis = dim % len(out.shape)
    whole = (shape_of(x) or ())[axis] or 0
    widths = [min(size, whole - at) for at in range(0, whole, size)]
    shapes = [(*out.shape[:axis], width, *out.shape[axis + 1 :]) for width in widths]
    return edit.split(None, x, edit.ints(*widths), shapes, axis)


def chunk(edit: Editor, out: Out, x: ir.Value, count: int, dim: int = 0) -> Sequence[ir.Value]:
    """``count`` equal pieces."""
    return split(edit, out, x, -(-((shape_of(x) or ())[dim] or 0) // count), dim)


def where(edit: Editor, out: Out, condition: ir.Value, x: Operand, y: Operand) -> ir.Value:
    """Of two, by element."""
    return edit.insert(None, "Where", [condition, *_same_type(edit, out, x, y)], out.shape, out.dtype)


def power(edit: Editor, out: Out, x: ir.Value, exponent: float) -> ir.Value:
    """A constant exponent."""
    if exponent == 2:
        return square(edit, out, x)
    return edit.insert(None, "Pow", [x, number(edit, exponent, out.dtype)], out.shape, out.dtype)


def square(edit: Editor, out: Out, x: ir.Value) -> ir.Value:
    """By itself."""
    return edit.insert(None, "Mul", [x, x], out.shape, out.dtype)


def rsqrt(edit: Editor, out: Out, x: ir.Value) -> ir.Value:
    """One over the root."""
    return edit.insert(None, "Reciprocal", [edit.insert(None, "Sqrt", [x], out.shape, out.dtype)], out.shape, out.dtype)


def silu(edit: Editor, out: Out, x: ir.Value) -> ir.Value:
    """``x * sigmoid(x)``."""
    return edit.insert(None, "Mul", [x, edit.insert(None, "Sigmoid", [x], out.shape, out.dtype)], out.shape, out.dtype)


def gelu(edit: Editor, out: Out, x: ir.Value, approximate: str = "none") -> ir.Value:
    """Exact or by tanh."""
    return edit.insert(None, "Gelu", [x], out.shape, out.dtype, {"approximate": approximate})


def clamp(edit: Editor, out: Out, x: ir.Value, low: float | None = None, high: float | None = None) -> ir.Value:
    """Bounded."""
    bounds = [None if bound is None else number(edit, bound, out.dtype) for bound in (low, high)]
    return edit.insert(None, "Clip", [x, *bounds], out.shape, out.dtype)


def mean(edit: Editor, out: Out, x: ir.Value, dims: Sequence[int], keep: bool = False) -> ir.Value:
    """Over dimensions."""
    return edit.insert(None, "ReduceMean", [x, edit.ints(*dims)], out.shape, out.dtype, {"keepdims": int(keep)})


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
    """Over the last dimensions."""
    weight = edit.constant(np.ones(tuple(sizes), np.float32)) if scale is None else scale
    terms = [x, weight, bias] if bias is not None else [x, weight]
    return edit.insert(None, "LayerNormalization", terms, out.shape, out.dtype, {"axis": -len(sizes), "epsilon": eps})


def argmax(edit: Editor, out: Out, x: ir.Value, dim: int, keep: bool = False) -> ir.Value:
    """The lowest index among equals."""
    return edit.insert(None, "ArgMax", [x], out.shape, out.dtype, {"axis": dim, "keepdims": int(keep)})


def size(edit: Editor, out: Out, x: ir.Value, dim: int) -> ir.Value:
    """A size that is known at run time only, as a number."""
    found = edit.insert(None, "Shape", [x], (1,), ir.DataType.INT64, {"start": dim, "end": dim + 1})
    return edit.reshape(None, found, ())


def arange(edit: Editor, out: Out, end: ir.Value, **_: object) -> ir.Value:
    """0, 1, .. up to a size that is known at run time only."""
    bounds = [number(edit, 0, out.dtype), cast(edit, Out((), out.dtype), end), number(edit, 1, out.dtype)]
    return edit.insert(None, "Range", bounds, out.shape, out.dtype)


def linear(edit: Editor, out: Out, x: ir.Value, weight: ir.Value, bias: ir.Value | None = None) -> ir.Value:
    """``[.., inputs] -> [.., outputs]``: a placeholder that keeps each weight whole; ``linears`` lowers it."""
    terms = [x, weight] if bias is None else [x, weight, bias]
    return edit.insert(None, LINEAR, terms, out.shape, out.dtype, domain=LINEAR_DOMAIN)


def heads(edit: Editor, out: Out, rows: ir.Value, kv_heads: int) -> ir.Value:
    """``[P, KV * hd] -> [1, KV, P, hd]``."""
    _, _, count, dim = out.shape
    return edit.transpose(None, edit.reshape(None, rows, (1, count, kv_heads, dim)), [0, 2, 1, 3])


def attend(
    edit: Editor,
    out: Out,
    query: ir.Value,
    keys: Sequence[ir.Value],
    values: Sequence[ir.Value],
    mask: ir.Value,
    scale: float,
    softcap: float,
) -> ir.Value:
    """Grouped attention over the joined runs: one product for scores and one for values per layer.

    Rows stay as the cache holds them, ``[P, KV * hd]``: FusedMatMul walks over them head by head. The heads of a group
    are rows of one matrix, so keys are read once per group.
    """
    _, rows, all_heads, dim = out.shape
    kv_heads = (shape_of(keys[0]) or ())[1]
    assert rows is not None and all_heads and kv_heads and dim
    groups = all_heads // kv_heads
    # Heads by (group member, key head): then a group's rows are already those of one matrix per key head. This moves
    # no data in the end: ``attention`` permutes the weights that made the heads instead.
    q = edit.reshape(None, edit.transpose(None, query, [0, 2, 1, 3]), (rows, kv_heads, groups, dim))
    q = edit.reshape(None, edit.transpose(None, q, [0, 2, 1, 3]), (rows * groups, kv_heads, dim))
    count = (shape_of(mask) or ())[-1]
    joined = []
    for runs in (keys, values):
        flat = [edit.reshape(None, edit.transpose(None, run, [0, 2, 1, 3]), _flat(run)) for run in runs]
        whole = cat(edit, Out((count, kv_heads * dim), out.dtype), flat) if len(flat) > 1 else flat[0]
        joined.append(edit.reshape(None, whole, (count, kv_heads, dim)))
    scores = _fused_matmul(edit, [q, joined[0]], (kv_heads, rows * groups, count), transB=1, transBatchA=1, alpha=scale)
    if softcap:
        cap = edit.scalar(softcap)
        for kind in ("Div", "Tanh", "Mul"):
            scores = edit.insert(None, kind, [scores] if kind == "Tanh" else [scores, cap], shape_of(scores), out.dtype)
    # The mask of one row serves all heads of its group.
    mask = edit.reshape(None, mask, (rows, 1, count))
    if groups > 1:
        mask = expand(edit, Out((rows, groups, count), out.dtype), mask)
    mask = edit.reshape(None, mask, (1, rows * groups, count))
    masked = edit.insert(None, "Add", [scores, mask], shape_of(scores), out.dtype)
    weights = edit.insert(None, "Softmax", [masked], shape_of(scores), out.dtype, {"axis": -1})
    got = _fused_matmul(edit, [weights, joined[1]], (kv_heads, rows * groups, dim), transB=0, transBatchA=0, alpha=1.0)
    got = edit.transpose(None, edit.reshape(None, got, (kv_heads, rows, groups, dim)), [1, 0, 2, 3])
    return edit.reshape(None, got, out.shape)


def _flat(run: ir.Value) -> Shape:
    _, kv_heads, count, dim = shape_of(run) or (None,) * 4
    assert kv_heads is not None and dim is not None
    return (count, kv_heads * dim)


def _fused_matmul(edit: Editor, terms: list[ir.Value], shape: Shape, **attributes: float) -> ir.Value:
    """ONNX Runtime's MatMul with transposed operands; the second one is read by heads."""
    fixed = {"transA": 0, "transBatchB": 1}
    return edit.insert(None, "FusedMatMul", terms, shape, terms[0].dtype, fixed | attributes, CONTRIB)


def rotary(edit: Editor, out: Out, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: bool) -> ir.Value:
    """Opset 23's RotaryEmbedding on ``[1, R, heads * hd]``; it takes each angle once."""
    _, all_heads, rows, dim = out.shape
    assert all_heads and rows is not None and dim
    flat = edit.reshape(None, edit.transpose(None, x, [0, 2, 1, 3]), (1, rows, all_heads * dim))
    last, step = (dim, 2) if interleaved else (dim // 2, 1)
    half = Out((1, rows, dim // 2), out.dtype)
    tables = [cut(edit, half, table, 2, 0, last, step) for table in (cos, sin)]
    attributes = {"interleaved": int(interleaved), "num_heads": all_heads}
    turned = edit.insert(None, "RotaryEmbedding", [flat, *tables], shape_of(flat), out.dtype, attributes)
    return edit.transpose(None, edit.reshape(None, turned, (1, rows, all_heads, dim)), [0, 2, 1, 3])


TRANSLATIONS: dict[Callable[..., Any], Translation] = {
    aten.linear.default: linear,
    own.heads.default: heads,
    own.attend.default: attend,
    own.rotary.default: rotary,
    # Views
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default), view),
    **dict.fromkeys((aten.dropout.default, aten.contiguous.default), same),
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
    aten.to.dtype: cast,
    aten.type_as.default: cast,
    aten.add.Tensor: _binary("Add"),
    aten.sub.Tensor: _binary("Sub"),
    aten.mul.Tensor: _binary("Mul"),
    aten.div.Tensor: _binary("Div"),
    aten.eq.Tensor: _binary("Equal"),
    aten.__and__.Tensor: _binary("And"),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _binary("Less")),
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _binary("LessOrEqual")),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _binary("GreaterOrEqual")),
    **dict.fromkeys((aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther), where),
    aten.pow.Tensor_Scalar: power,
    aten.square.default: square,
    aten.rsqrt.default: rsqrt,
    aten.silu.default: silu,
    aten.gelu.default: gelu,
    aten.clamp_.default: clamp,
    aten.neg.default: _one("Neg"),
    aten.tanh.default: _one("Tanh"),
    aten.relu.default: _one("Relu"),
    # Over a dimension
    aten.matmul.default: _binary("MatMul"),
    aten.mean.dim: mean,
    aten.layer_norm.default: layer_norm,
    aten.argmax.default: argmax,
    # The dynamic size
    aten.sym_size.int: size,
    aten.arange.default: arange,
}
assert callable(forms.exportable)  # registering the operators is the effect of the import
