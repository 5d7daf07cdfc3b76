"""What the project's own operators become in ONNX: linears, attention over runs of rows, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from ssdevice.export import forms
from ssdevice.export.onnx.editor import CONTRIB, Editor, Shape, shape_of
from ssdevice.export.onnx.linears import LINEAR, LINEAR_DOMAIN
from ssdevice.export.onnx.translations import Out, Translation, cat, cut, expand


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
    # no data in the end: ``heads.permuted_heads`` permutes the weights that made the heads instead.
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


assert callable(forms.exportable)  # registering the operators is the effect of the import
OPERATORS: dict[Callable[..., Any], Translation] = {
    torch.ops.aten.linear.default: linear,
    torch.ops.ssdevice.heads.default: heads,
    torch.ops.ssdevice.attend.default: attend,
    torch.ops.ssdevice.rotary.default: rotary,
}
