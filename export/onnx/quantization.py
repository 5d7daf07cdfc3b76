"""Quantized linears and embeddings for ONNX Runtime.

int8: weights per output column, symmetric; inputs per row, symmetric around 128 in uint8 (signed inputs take a path
that is many times slower on x86). Rows never share a scale, so a draft row cannot change a verified one. int4: blocks
of 32 along the inputs for linears; embedding and head stay int8, where four bits cost most accuracy and save least
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ssdevice.adapters.slots import Slot
from ssdevice.adapters.weights import LEVELS, int8_factors
from ssdevice.export.calibration.grid import Grid, lowest
from ssdevice.export.onnx.editor import CONTRIB, Editor, clean, constant_of, role_of, shape_of
from ssdevice.export.onnx.functions import BLOCK, ZERO_POINT
from ssdevice.export.onnx.linears import (
    SMALL,
    Linear,
    Product,
    fits_half,
    half_product,
    linears,
    lower,
    out_shape,
    plain_product,
    transposed_name,
)
from ssdevice.export.onnx.slots import SlotBook, float_down, int8_down, lower_alone, up
from ssdevice.export.plan import Quant
from ssdevice.model.mapped import release
from ssdevice.model.roles import Part
from ssdevice.runtime.onnx.kernels import DOMAIN, INT4_LINEAR, INT8_EMBEDDING, INT8_LINEAR

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Int8Weight:
    """``values [K, N]`` int8 and ``scale [N]`` float32 with ``weight ≈ values * scale``."""

    values: Array
    scale: Array

    @classmethod
    def of(cls, weight: Array) -> Int8Weight:
        """Nearest int8 form of ``weight [K, N]``; a column of zeros gets scale 1."""
        return cls(*int8_factors(weight))

    def dequantized(self) -> Array:
        """``[K, N]`` float32."""
        values = self.values.astype(np.float32)
        values *= self.scale
        return values


@dataclass(frozen=True)
class Int4Weight:
    """``packed [N, K / 32, 16]`` uint8 (low nibble first, zero at 8) and ``scale [N, K / 32]`` float32."""

    packed: Array
    scale: Array
    inputs: int

    @classmethod
    def of(cls, weight: Array) -> Int4Weight:
        """Nearest blockwise int4 form of ``weight [K, N]``; a K that is no multiple of 32 is padded with zeros.

        The value of largest magnitude in a block maps to -8, so that all sixteen codes are used. Scales are bfloat16
        numbers, as calibrated ones are (``calibration.grid``): our kernel reads a tenth less for it. A block of zeros
        has scale 0: kernels that subtract the zero point from the sum leave a rounding of the block's inputs otherwise.
        """
        inputs, outputs = weight.shape
        blocks = -(-inputs // BLOCK)
        padded = np.zeros((outputs, blocks * BLOCK), np.float32)
        padded[:, :inputs] = weight.T
        grouped = padded.reshape(outputs, blocks, BLOCK)
        at = np.abs(grouped).argmax(axis=2)[..., None]
        peak = np.take_along_axis(grouped, at, axis=2)[..., 0]
        scale = torch.from_numpy(peak / np.float32(-8)).bfloat16().float().numpy() + np.float32(0)
        step = np.where(scale != 0, scale, np.float32(1))
        codes = np.clip(np.rint(grouped / step[..., None]) + 8, 0, 15).astype(np.uint8)
        return cls(codes[..., 0::2] | codes[..., 1::2] << 4, scale, inputs)

    def dequantized(self) -> Array:
        """``[K, N]`` float32."""
        codes = np.stack([self.packed & 15, self.packed >> 4], axis=-1).reshape(*self.scale.shape, BLOCK)
        values = (codes.astype(np.float32) - 8) * self.scale[..., None]
        return np.ascontiguousarray(values.reshape(len(values), -1)[:, : self.inputs].T)


INT4_GRID = Grid(BLOCK, lowest, -8, 7)
"""What ``Int4Weight.of`` rounds to."""


@dataclass
class WeightStore:
    """Quantized weights by name, shared by the graphs of one export so that each is quantized once."""

    int8: dict[str, Int8Weight] = field(default_factory=dict)
    int4: dict[str, Int4Weight] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    """Float32 weights that stayed so: name -> elements."""

    def as_int8(self, name: str, weight: Callable[[], Array]) -> Int8Weight:
        """The int8 form of a weight ``[K, N]``, which is asked for the first time only."""
        if name not in self.int8:
            self.int8[name] = Int8Weight.of(weight())
            release()
        return self.int8[name]

    def as_int4(self, name: str, weight: Callable[[], Array]) -> Int4Weight:
        """The int4 form of a weight ``[K, N]``, which is asked for the first time only."""
        if name not in self.int4:
            self.int4[name] = Int4Weight.of(weight())
            release()
        return self.int4[name]


def quantize(edit: Editor, quant: Quant, store: WeightStore, book: SlotBook | None = None) -> None:
    """Lower every linear and embedding of a graph to the form ``quant`` asks for.

    ``book``: low-rank terms become slots, which are entered in it; without one they are weights like all others.
    """
    if quant is Quant.FP32:
        _share_tied_table(edit)
    tied = _quantize_embeddings(edit, store) if quant in (Quant.INT8, Quant.INT4) else set()
    inputs = _RowQuantizer(edit)
    pairs = book.pairs(edit) if book is not None else {}
    terms = {node: pair.add for node, pair in pairs.items() if pair.add is not None}
    for linear in linears(edit):
        if book is not None and linear.factor:
            continue
        quantized = quant is not Quant.FP32 and not linear.stays_float
        slot = book.slot(linear, pairs, quantized) if book is not None else None
        kept = quant is not Quant.FP32 and linear.stays_float
        if kept:
            store.kept[linear.name] = linear.inputs * linear.outputs
        product: Product
        if kept and slot is None and fits_half(linear):
            product = half_product
        elif not quantized:
            product = _with_slot(plain_product, slot, inputs, quant is not Quant.FP32)
        elif quant is Quant.INT8 or linear.name in tied or _is_head(linear):
            product = _Int8Product(inputs, store, slot)
        else:
            product = _with_slot(_Int4Product(store), slot, inputs, True)
        lower(edit, linear, product, terms)
    clean(edit.model)  # the terms that slots stand for
    if book is not None:
        lower_alone(edit, book)


def _with_slot(product: Product, slot: Slot | None, rows: _RowQuantizer, exact: bool) -> Product:
    """A product with its slot's low-rank term added."""
    if slot is None:
        return product

    def both(edit: Editor, linear: Linear, before: ir.Node) -> ir.Value:
        shape = out_shape(linear)
        base = product(edit, linear, before)
        if slot.int8:
            codes, row_scale = rows(linear.source, before)
            h = int8_down(edit, slot, codes, edit.constant(np.array(ZERO_POINT, np.uint8)), before)
            term = edit.insert(before, "Mul", [up(edit, slot, h, before, exact), row_scale], shape, ir.DataType.FLOAT)
        else:
            term = up(edit, slot, float_down(edit, slot, linear.source, before, exact), before, exact)
        return edit.insert(before, "Add", [base, term], shape, ir.DataType.FLOAT)

    return both


def _is_head(linear: Linear) -> bool:
    return linear.role is not None and linear.role.part in (Part.HEAD, Part.EMBEDDING)


class _RowQuantizer:
    """Quantizes a value's rows once, however many linears with slots read it: ``(uint8 values, scale)``."""

    def __init__(self, edit: Editor) -> None:
        self.edit = edit
        self._done: dict[int, tuple[ir.Value, ir.Value]] = {}

    def __call__(self, value: ir.Value, before: ir.Node) -> tuple[ir.Value, ir.Value]:
        if id(value) not in self._done:
            self._done[id(value)] = self._quantize(value, before)
        return self._done[id(value)]

    def _quantize(self, value: ir.Value, before: ir.Node) -> tuple[ir.Value, ir.Value]:
        """What the function of ``Int8Linear`` does with its rows, for products that have a slot."""
        edit, shape = self.edit, shape_of(value)
        zero, form = self.form(value)
        peak_shape = shape_of(zero)
        size = edit.insert(before, "Abs", [value], shape, ir.DataType.FLOAT)
        keep = {"keepdims": form["keep"]}
        peak = edit.insert(before, "ReduceMax", [size, edit.ints(*form["axes"])], peak_shape, ir.DataType.FLOAT, keep)
        step = edit.constant(np.array(1 / LEVELS, np.float32))
        scale = edit.insert(before, "Mul", [peak, step], peak_shape, ir.DataType.FLOAT)
        block = {"axis": form["axis"], "block_size": form["block"]}
        codes = edit.insert(before, "QuantizeLinear", [value, scale, zero], shape, ir.DataType.UINT8, block)
        return codes, scale

    def form(self, value: ir.Value) -> tuple[ir.Value, dict[str, Any]]:
        """The zero point of rows and the attributes of ``Int8Linear`` for their shape: one row has a single scale."""
        shape = shape_of(value)
        if shape is None or None in shape:
            raise ValueError(f"the rows of {value.name} are not static: {shape}")
        axes = list(range(len(shape)))
        if prod(size or 0 for size in shape[:-1]) == 1:
            return self.edit.constant(np.array(ZERO_POINT, np.uint8)), {"axes": axes, "keep": 0, "axis": 1, "block": 0}
        zeros = self.edit.constant(np.full((*shape[:-1], 1), ZERO_POINT, np.uint8))
        return zeros, {"axes": [-1], "keep": 1, "axis": axes[-1], "block": shape[-1]}


@dataclass(frozen=True)
class _Int8Product:
    """An integer product; a slot's term is added before the rows' scale is multiplied in."""

    rows: _RowQuantizer
    store: WeightStore
    slot: Slot | None

    def __call__(self, edit: Editor, linear: Linear, before: ir.Node) -> ir.Value:
        weight = self.store.as_int8(linear.name, linear.weight)
        values = _named(edit, f"{linear.name}.int8", weight.values)
        scale = _named(edit, f"{linear.name}.scale", weight.scale)
        shape = out_shape(linear)
        if self.slot is None:
            zero, views = self.rows.form(linear.source)
            inputs = [linear.source, values, scale, zero]
            return edit.insert(before, INT8_LINEAR, inputs, shape, ir.DataType.FLOAT, views, DOMAIN)
        codes, row_scale = self.rows(linear.source, before)
        zero = edit.constant(np.array(ZERO_POINT, np.uint8))
        inputs = [codes, values, edit.scalar(1.0), scale, zero]
        product = edit.insert(before, "MatMulIntegerToFloat", inputs, shape, ir.DataType.FLOAT, None, CONTRIB)
        h = int8_down(edit, self.slot, codes, zero, before)
        term = up(edit, self.slot, h, before, exact=True)
        product = edit.insert(before, "Add", [product, term], shape, ir.DataType.FLOAT)
        return edit.insert(before, "Mul", [product, row_scale], shape, ir.DataType.FLOAT)


@dataclass(frozen=True)
class _Int4Product:
    """A product with blocks of four bits."""

    store: WeightStore

    def __call__(self, edit: Editor, linear: Linear, before: ir.Node) -> ir.Value:
        weight = self.store.as_int4(linear.name, linear.weight)
        packed = _named(edit, f"{linear.name}.int4", weight.packed)
        scale = _named(edit, f"{linear.name}.scale", weight.scale)
        sizes = {"K": linear.inputs, "N": linear.outputs}
        inputs = [linear.source, packed, scale]
        return edit.insert(before, INT4_LINEAR, inputs, out_shape(linear), ir.DataType.FLOAT, sizes, DOMAIN)


def _quantize_embeddings(edit: Editor, store: WeightStore) -> set[str]:
    """Gathers from the float table become gathers from its int8 form, stored as the head's ``[D, V]`` wants it.

    A tied head then shares the bytes. Returns the names of the tables.
    """
    names = set()
    for node in list(edit.graph):
        table = node.inputs[0] if node.op_type == "Gather" and node.inputs else None
        content = constant_of(table)
        if table is None or content is None or content.ndim != 2 or content.dtype != np.float32:
            continue
        name, role = table.name or "", role_of(table)
        if content.size < SMALL or node.attributes.get_int("axis", 0) != 0:
            continue
        if role is None or role.part is not Part.EMBEDDING:
            continue
        names.add(name)
        ids = node.inputs[1]
        shape = shape_of(ids)
        if ids is None or shape is None or None in shape:
            raise ValueError(f"the embedding {name} is read with ids of unknown shape")
        weight = store.as_int8(name, partial(np.transpose, content))
        values = _named(edit, f"{name}.int8", weight.values)
        scale = _named(edit, f"{name}.scale", weight.scale)
        if ids.dtype is not ir.DataType.INT32:
            ids = edit.insert(node, "Cast", [ids], shape, ir.DataType.INT32, {"to": int(ir.DataType.INT32)})
        out = [size or 0 for size in (*shape, content.shape[1])]
        inputs = [ids, values, scale]
        edit.replace(node, edit.insert(node, INT8_EMBEDDING, inputs, out, ir.DataType.FLOAT, {"whole": out}, DOMAIN))
    return names


def _share_tied_table(edit: Editor) -> None:
    """An embedding that is also the head is read from the head's ``[D, V]``, so that it is stored once."""
    heads = {linear.name: linear for linear in linears(edit) if len(linear.parts) == 1}
    for node in list(edit.graph):
        table = node.inputs[0] if node.op_type == "Gather" and node.inputs else None
        ids = node.inputs[1] if table is not None else None
        shape = shape_of(ids)
        if table is None or ids is None or table.name not in heads or shape is None or None in shape:
            continue
        head = heads[table.name]
        rows = prod([size or 0 for size in shape])
        stored = _named(edit, transposed_name(head), head.weight())
        flat = edit.reshape(node, ids, (rows,))
        columns = edit.insert(node, "Gather", [stored, flat], (head.inputs, rows), ir.DataType.FLOAT, {"axis": 1})
        turned = edit.insert(node, "Transpose", [columns], (rows, head.inputs), ir.DataType.FLOAT, {"perm": [1, 0]})
        edit.replace(node, edit.reshape(node, turned, (*shape, head.inputs)))


def _named(edit: Editor, name: str, content: Array) -> ir.Value:
    known = edit.graph.initializers.get(name)
    return known if known is not None else edit.constant(content, name)
