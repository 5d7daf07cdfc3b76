"""How the operators of ``ssdevice.export.forms`` become ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx.defs import OpSchema
from onnxscript import opset23 as op
from onnxscript.values import Op, Opset

from ssdevice.export import forms
from ssdevice.export.onnx.linears import LINEAR, LINEAR_DOMAIN

CONTRIB = "com.microsoft"


def _linear() -> Op:
    """A placeholder that keeps each weight whole and under its own name; ``linears`` lowers it."""
    schema = OpSchema(
        LINEAR,
        LINEAR_DOMAIN,
        1,
        inputs=[
            OpSchema.FormalParameter("x", "T"),
            OpSchema.FormalParameter("weight", "T"),
            OpSchema.FormalParameter("bias", "T", param_option=OpSchema.FormalParameterOption.Optional),
        ],
        outputs=[OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", ["tensor(float)"], "element type")],
    )
    return Op(Opset(LINEAR_DOMAIN, 1), LINEAR, schema)


def _fused_matmul() -> Op:
    """ONNX Runtime's MatMul with transposed operands; the tracer wants a schema, which the onnx package has not."""
    attributes = {"alpha": OpSchema.AttrType.FLOAT} | dict.fromkeys(
        ("transA", "transB", "transBatchA", "transBatchB"), OpSchema.AttrType.INT
    )
    schema = OpSchema(
        "FusedMatMul",
        CONTRIB,
        1,
        inputs=[OpSchema.FormalParameter("A", "T"), OpSchema.FormalParameter("B", "T")],
        outputs=[OpSchema.FormalParameter("Y", "T")],
        type_constraints=[("T", ["tensor(float)"], "element type")],
        attributes=[OpSchema.Attribute(name, kind) for name, kind in attributes.items()],
    )
    return Op(Opset(CONTRIB, 1), "FusedMatMul", schema)


FUSED_MATMUL = _fused_matmul()
PLACEHOLDER = _linear()


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))


def heads(rows: Any, kv_heads: int) -> Any:
    """``[P, KV * hd] -> [1, KV, P, hd]``."""
    return op.Transpose(op.Reshape(rows, _ints(1, -1, kv_heads, rows.shape[1] // kv_heads)), perm=[0, 2, 1, 3])


def attend(query: Any, keys: Sequence[Any], values: Sequence[Any], mask: Any, scale: float, softcap: float) -> Any:
    """Grouped attention over the joined runs: one product for scores and one for values per layer.

    Rows stay as the cache holds them, ``[P, KV * hd]``: FusedMatMul walks over them head by head. The heads of a group
    are rows of one matrix, so keys are read once per group.
    """
    _, all_heads, rows, dim = query.shape
    kv_heads = keys[0].shape[1]
    groups = all_heads // kv_heads
    # Heads by (group member, key head): then a group's rows are already those of one matrix per key head. This moves
    # no data in the end: ``attention`` permutes the weights that made the heads instead.
    q = op.Reshape(op.Transpose(query, perm=[0, 2, 1, 3]), _ints(rows, kv_heads, groups, dim))
    q = op.Reshape(op.Transpose(q, perm=[0, 2, 1, 3]), _ints(rows * groups, kv_heads, dim))
    joined = []
    for runs in (keys, values):
        flat = [op.Reshape(op.Transpose(run, perm=[0, 2, 1, 3]), _ints(-1, kv_heads * dim)) for run in runs]
        whole = op.Concat(*flat, axis=0) if len(flat) > 1 else flat[0]
        joined.append(op.Reshape(whole, _ints(-1, kv_heads, dim)))
    scores = FUSED_MATMUL(q, joined[0], alpha=scale, transBatchA=1, transBatchB=1, transA=0, transB=1)
    if softcap:
        cap = op.Constant(value_float=softcap)
        scores = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
    # The mask of one row serves all heads of its group.
    mask = op.Reshape(mask, _ints(rows, 1, -1))
    if groups > 1:
        mask = op.Expand(mask, _ints(1, groups, 1))
    weights = op.Softmax(op.Add(scores, op.Reshape(mask, _ints(1, rows * groups, -1))), axis=-1)
    out = FUSED_MATMUL(weights, joined[1], alpha=1.0, transBatchA=0, transBatchB=1, transA=0, transB=0)
    out = op.Transpose(op.Reshape(out, _ints(kv_heads, rows, groups, dim)), perm=[1, 0, 2, 3])
    return op.Reshape(out, _ints(1, rows, all_heads, dim))


def rotary(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Opset 23's RotaryEmbedding on ``[1, R, heads * hd]``; it takes each angle once."""
    _, all_heads, rows, dim = x.shape
    half = dim // 2
    flat = op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), _ints(1, rows, all_heads * dim))
    if interleaved:
        tables = [op.Slice(t, _ints(0), _ints(dim), _ints(2), _ints(2)) for t in (cos, sin)]
    else:
        tables = [op.Slice(t, _ints(0), _ints(half), _ints(2), _ints(1)) for t in (cos, sin)]
    turned = op.RotaryEmbedding(flat, *tables, interleaved=int(interleaved), num_heads=all_heads)
    return op.Transpose(op.Reshape(turned, _ints(1, rows, all_heads, dim)), perm=[0, 2, 1, 3])


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """``[.., inputs] -> [.., outputs]``."""
    return PLACEHOLDER(x, weight) if bias is None else PLACEHOLDER(x, weight, bias)


TRANSLATIONS: dict[Callable[..., Any], Any] = {
    torch.ops.ssdevice.heads.default: heads,
    torch.ops.ssdevice.attend.default: attend,
    torch.ops.ssdevice.rotary.default: rotary,
    torch.ops.aten.linear.default: linear,
}
assert callable(forms.exportable)  # registering the operators is the effect of the import
