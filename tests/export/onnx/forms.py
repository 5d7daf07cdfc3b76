"""Small graphs of quantized linears, embeddings and heads, and what they compute in NumPy, integer
by integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from ssdevice.adapters.slots import Slot, SlotKind
from ssdevice.adapters.storage import LEVELS, int8_factors
from ssdevice.export.onnx.editor import CONTRIB, OPSET, Editor, tag
from ssdevice.export.onnx.functions import ZERO_POINT, add_functions
from ssdevice.export.onnx.linears import LINEAR, LINEAR_DOMAIN
from ssdevice.export.onnx.quantization import quantize, schemes
from ssdevice.export.onnx.slots import SlotBook
from ssdevice.export.plan import Quant
from ssdevice.export.weights import Part, Role, Stored
from ssdevice.runtime.onnx.kernels import DOMAIN, HALF_LINEAR

Floats = NDArray[np.float32]
PARTS = {"layers", "head", "verification", "streams", "stream head", "rows"}
SOURCE = "model.layers.0.self_attn.o_proj"
"""What the adapter folder calls the low-rank term."""


def value(name: str, shape: tuple[int, ...], kind: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    """A graph's input, or the output of a node once it is renamed."""
    return ir.Value(name=name, shape=ir.Shape(list(shape)), type=ir.TensorType(kind))


def stored(name: str, content: Floats) -> ir.Value:
    """An initializer."""
    made = value(name, content.shape)
    made.const_value = ir.Tensor(content, name=name)
    return made


def placeholder(x: ir.Value, weight: ir.Value, rows: int, name: str) -> ir.Node:
    """A linear as the exporter leaves it: ``x [1, rows, K]`` times ``weight [N, K]``."""
    node = ir.node(LINEAR, [x, weight], domain=LINEAR_DOMAIN)
    assert weight.shape is not None
    out = node.outputs[0]
    out.name = name
    out.shape = ir.Shape([1, rows, weight.shape[0]])
    out.type = ir.TensorType(ir.DataType.FLOAT)
    return node


def quantized(
    inputs: list[ir.Value],
    nodes: list[ir.Node],
    outputs: list[ir.Value],
    initializers: list[ir.Value],
    quant: Quant,
    book: SlotBook | None = None,
    roles: Mapping[str, Role] | None = None,
) -> bytes:
    """The file of the graph once its linears are lowered."""
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, initializers=initializers, opset_imports={"": 23, CONTRIB: 1}
    )
    edit = Editor(ir.Model(graph, ir_version=11))
    tag(edit.model, {value.name or "": row(value, quant, roles or {}) for value in initializers})
    quantize(edit, quant, {}, book)
    add_functions(edit.model, alone=inputs[0].shape is not None and inputs[0].shape[1] == 1)
    content: bytes = ir.serde.serialize_model(edit.model).SerializeToString()
    return content


def row(value: ir.Value, quant: Quant, roles: Mapping[str, Role]) -> Stored:
    """The row of an initializer in the table of weights; without a role it is a linear's."""
    name = value.name or ""
    assert value.const_value is not None
    weight = torch.from_numpy(value.const_value.numpy())
    role = roles.get(name, Role(Part.LINEAR))
    scheme, _ = schemes(quant).of(role, weight)
    return Stored((name,), (), weight, role, scheme)


def linears_model(rows: int, weights: list[Floats], quant: Quant) -> bytes:
    """``x [1, rows, K]`` through one linear per weight ``[N, K]``, which are merged: y0, y1, .."""
    x = value("x", (1, rows, weights[0].shape[1]))
    tables = [stored(f"w{i}", weight) for i, weight in enumerate(weights)]
    nodes = [placeholder(x, table, rows, f"y{i}") for i, table in enumerate(tables)]
    return quantized([x], nodes, [node.outputs[0] for node in nodes], tables, quant)


def half_linear_model(rows: int, weight: NDArray[np.float16]) -> bytes:
    """``x [1, rows, K]`` times ``weight [K, N]``: y."""
    x = value("x", (1, rows, len(weight)))
    table = value("w", weight.shape, ir.DataType.FLOAT16)
    table.const_value = ir.Tensor(weight, name="w")
    node = ir.node(HALF_LINEAR, [x, table], domain=DOMAIN)
    y = node.outputs[0]
    y.name = "y"
    y.shape = ir.Shape([1, rows, weight.shape[1]])
    y.type = ir.TensorType(ir.DataType.FLOAT)
    imports = {"": OPSET, CONTRIB: 1, DOMAIN: 1}
    model = ir.Model(
        ir.Graph([x], [y], nodes=[node], initializers=[table], opset_imports=imports, name="g"),
        ir_version=11,
    )
    add_functions(model)
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def tied_model(rows: int, table: Floats, quant: Quant) -> bytes:
    """``ids [1, rows]`` through the embedding and the head that share ``table [V, D]``: the logits
    y0.
    """
    ids = value("ids", (1, rows), ir.DataType.INT64)
    weight = stored("embed.weight", table)
    gather = ir.node("Gather", [weight, ids], {"axis": 0})
    row = gather.outputs[0]
    row.name = "rows"
    row.shape = ir.Shape([1, rows, table.shape[1]])
    row.type = ir.TensorType(ir.DataType.FLOAT)
    head = placeholder(row, weight, rows, "y0")
    roles = {"embed.weight": Role(Part.EMBEDDING)}
    return quantized([ids], [gather, head], [head.outputs[0]], [weight], quant, roles=roles)


def slot_model(rows: int, weight: Floats, rank: int, quant: Quant) -> bytes:
    """``x`` through a linear ``[N, K]`` with a low-rank term whose factors are inputs of the graph:
    y0.
    """
    outputs, inputs = weight.shape
    x = value("x", (1, rows, inputs))
    base = stored("base", weight)
    down = stored("down", np.zeros((rank, inputs), np.float32))
    up = stored("up", np.zeros((outputs, rank), np.float32))
    first = placeholder(x, base, rows, "whole")
    narrow = placeholder(x, down, rows, "narrow")
    wide = placeholder(narrow.outputs[0], up, rows, "wide")
    total = ir.node("Add", [first.outputs[0], wide.outputs[0]])
    out = total.outputs[0]
    out.name = "y0"
    out.shape = ir.Shape([1, rows, outputs])
    out.type = ir.TensorType(ir.DataType.FLOAT)
    nodes = [first, narrow, wide, total]
    factor = Role(Part.FACTOR, SlotKind.LORA, SOURCE)
    roles = {"down": factor, "up": replace(factor, up=True)}
    return quantized([x], nodes, [out], [base, down, up], quant, SlotBook(True), roles)


def slot_feeds(weight: Floats, down: Floats) -> dict[str, NDArray[np.generic]]:
    """The inputs of ``slot_model`` for the factor ``down [K, r]``; ``up`` is the identity, so that
    sums stay exact.
    """
    outputs, inputs = weight.shape
    slot = Slot(SlotKind.LORA, (SOURCE,), inputs, (outputs,), int8=True)
    values, scale = int8_factors(down)
    up = np.eye(down.shape[1], outputs, dtype=np.float32)
    return {slot.down.name: values, slot.down_scale.name: scale, slot.ups[0].name: up}


def row_codes(x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Rows as uint8 without their zero point, and their scales ``[.., 1]``."""
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / LEVELS)
    codes = np.clip(np.rint(x / np.where(scale > 0, scale, np.float32(1))) + ZERO_POINT, 0, 255)
    return codes.astype(np.int64) - ZERO_POINT, scale


def int8_product(x: Floats, weight: Floats) -> Floats:
    """``x [.., K] @ weight [K, N]`` through sums of integers that never overflow; the graph's bits,
    not near them.
    """
    codes, row_scale = row_codes(x)
    values, scale = int8_factors(weight)
    return (codes @ values.astype(np.int64)).astype(np.float32) * scale * row_scale


def int8_slot_product(x: Floats, weight: Floats, down: Floats) -> Floats:
    """``int8_product`` with the term of ``slot_feeds`` added."""
    whole = int8_product(x, weight)
    whole[..., : down.shape[1]] += int8_product(x, down)
    return whole


def embedded(ids: NDArray[np.int64], table: Floats) -> Floats:
    """Rows of ``table [V, D]`` as the int8 embedding gives them."""
    values, scale = int8_factors(np.ascontiguousarray(table.T))
    return (values.T[ids].astype(np.float32) * scale[ids][..., None]).astype(np.float32)
