"""What the project's own operators become in ONNX: linears, attention over runs of rows, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ssdevice.export import forms
from ssdevice.export.onnx.editor import Editor, Shape, constant_of, shape_of, source_of
from ssdevice.export.onnx.functions import attention_form
from ssdevice.export.onnx.linears import LINEAR, LINEAR_DOMAIN
from ssdevice.export.onnx.translations import Out, Translation, cast, largest
from ssdevice.runtime.onnx.kernels import CAPPED_ATTENTION, DOMAIN, HALF_TREE_ATTENTION, TREE_ATTENTION


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
    """Grouped attention over the runs of the cache and of new rows, which stay as the cache holds them."""
    _, rows, all_heads, dim = out.shape
    assert rows is not None and all_heads and dim
    kv_heads = (shape_of(keys[0]) or ())[1]
    assert kv_heads
    width = kv_heads * dim
    empty = edit.constant(np.zeros((0, width), np.float32))
    terms = [_by_row(edit, query, (1, rows, all_heads * dim))]
    for past, new, *more in (keys, values):
        sizes = [(shape_of(run) or ())[2] for run in (new, *more)]
        terms.append(_by_row(edit, past, (None, width)))
        terms += [_by_row(edit, run, (1, size, width)) for run, size in zip((new, *more), sizes, strict=True)]
        terms += [] if more else [empty]
    terms.append(mask)
    form = attention_form(rows, kv_heads, all_heads // kv_heads, dim, scale)
    kind = HALF_TREE_ATTENTION if keys[0].dtype is ir.DataType.FLOAT16 else TREE_ATTENTION
    if softcap:
        kind, form = CAPPED_ATTENTION, form | {"softcap": softcap}
    made = edit.insert(None, kind, terms, shape_of(terms[0]), out.dtype, form, DOMAIN)
    return edit.reshape(None, made, out.shape)


def _by_row(edit: Editor, heads: ir.Value, shape: Shape) -> ir.Value:
    """``[1, H, R, hd]`` as rows of ``H * hd``."""
    return edit.reshape(None, edit.transpose(None, heads, [0, 2, 1, 3]), shape)


def rotary(edit: Editor, out: Out, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: bool) -> ir.Value:
    """Opset 23's RotaryEmbedding on ``[1, R, heads * hd]``; it takes each angle once."""
    _, all_heads, rows, dim = out.shape
    assert all_heads and rows is not None and dim
    flat = edit.reshape(None, edit.transpose(None, x, [0, 2, 1, 3]), (1, rows, all_heads * dim))
    tables = [_half(edit, table, slice(0, None, 2) if interleaved else slice(dim // 2)) for table in (cos, sin)]
    attributes = {"interleaved": int(interleaved), "num_heads": all_heads}
    turned = edit.insert(None, "RotaryEmbedding", [flat, *tables], shape_of(flat), out.dtype, attributes)
    return edit.transpose(None, edit.reshape(None, turned, (1, rows, all_heads, dim)), [0, 2, 1, 3])


def _half(edit: Editor, angles: ir.Value, columns: slice) -> ir.Value:
    """Rows of a table of angles, with those columns that hold each angle once."""
    gather = angles.producer()
    table = source_of(gather) if gather is not None else None
    content = constant_of(table)
    assert gather is not None and table is not None and content is not None
    half = edit.named(f"{table.name}.half", lambda: np.ascontiguousarray(content[:, columns]))
    shape = (*(shape_of(angles) or ())[:-1], content.shape[1] // 2)
    return edit.insert(None, "Gather", [half, gather.inputs[1]], shape, half.dtype)


def top_k(edit: Editor, out: Out, scores: ir.Value, k: int) -> ir.Value:
    """``[R, V] -> [R, k]``, best first."""
    return edit.reshape(None, cast(edit, out, largest(edit, scores, k)), out.shape)


assert callable(forms.exportable)  # registering the operators is the effect of the import
OPERATORS: dict[Callable[..., Any], Translation] = {
    torch.ops.aten.linear.default: linear,
    torch.ops.ssdevice.heads.default: heads,
    torch.ops.ssdevice.attend.default: attend,
    torch.ops.ssdevice.rotary.default: rotary,
    torch.ops.ssdevice.top_k.default: top_k,
}
