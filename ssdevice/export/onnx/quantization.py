"""Quantized linears and embeddings for ONNX Runtime.

int8: weights per output column, symmetric; inputs per row, symmetric around 128 in uint8 (signed
inputs take a path that is many times slower on x86). Rows never share a scale, so a draft row
cannot change a verified one. int4: blocks of 32 along the inputs for linears; embedding and head
stay int8, where four bits cost most accuracy and save least time.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import ClassVar, Self

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from ssdevice.adapters.storage import LEVELS, int8_factors
from ssdevice.export.calibration.grid import Grid, lowest
from ssdevice.export.onnx.editor import Editor, constant_of, role_of, sizes_of, source_of
from ssdevice.export.onnx.functions import BLOCK, row_form
from ssdevice.export.onnx.linears import SMALL, Array, Linear, fits_half, linears, lower
from ssdevice.export.onnx.slots import SlotBook, beside, lower_alone
from ssdevice.export.plan import Quant
from ssdevice.model.attention import Attending, Attention
from ssdevice.model.lora import LoraLinear
from ssdevice.model.mapped import release
from ssdevice.model.roles import Part
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import StreamRowAdapter, low_rank_factors
from ssdevice.runtime.onnx.kernels import (
    DOMAIN,
    HALF_LINEAR,
    INT4_LINEAR,
    INT8_EMBEDDING,
    INT8_LINEAR,
)


@dataclass(frozen=True)
class Int8Weight:
    """``codes [K, N]`` int8 and ``scale [N]`` float32 with ``weight ≈ codes * scale``."""

    suffix: ClassVar[str] = "int8"
    codes: Array
    scale: Array

    @classmethod
    def of(cls, weight: Array) -> Self:
        """Nearest int8 form of ``weight [K, N]``; a column of zeros gets scale 1."""
        return cls(*int8_factors(weight))

    def dequantized(self) -> Array:
        """``[K, N]`` float32."""
        values = self.codes.astype(np.float32)
        values *= self.scale
        return values


@dataclass(frozen=True)
class Int4Weight:
    """``codes [N, K / 32, 16]`` uint8 (low nibble first, zero at 8) and ``scale [N, K / 32]``
    float32.
    """

    suffix: ClassVar[str] = "int4"
    codes: Array
    scale: Array
    inputs: int

    @classmethod
    def of(cls, weight: Array) -> Self:
        """Nearest blockwise int4 form of ``weight [K, N]``; a K that is no multiple of 32 is padded
        with zeros.

        The value of largest magnitude in a block maps to -8, so that all sixteen codes are used.
        Scales are bfloat16 numbers, as calibrated ones are (``calibration.grid``): our kernel reads
        a tenth less for it. A block of zeros has scale 0: kernels that subtract the zero point from
        the sum leave a rounding of the block's inputs otherwise.
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
        codes = np.stack([self.codes & 15, self.codes >> 4], axis=-1).reshape(
            *self.scale.shape, BLOCK
        )
        values = (codes.astype(np.float32) - 8) * self.scale[..., None]
        return np.ascontiguousarray(values.reshape(len(values), -1)[:, : self.inputs].T)


Weight = Int8Weight | Int4Weight
INT4_GRID = Grid(BLOCK, lowest, -8, 7)
"""What ``Int4Weight.of`` rounds to."""


@dataclass
class WeightStore:
    """Quantized weights by form and name, shared by the graphs of one export so that each is
    quantized once.
    """

    forms: dict[tuple[str, str], Weight] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    """Float32 weights that stayed so: name -> elements."""

    def initializers(
        self, edit: Editor, form: type[Weight], name: str, weight: Callable[[], Array]
    ) -> list[ir.Value]:
        """Codes and scales in a graph, of a weight ``[K, N]`` that is asked for the first time
        only.
        """
        if (form.suffix, name) not in self.forms:
            self.forms[form.suffix, name] = form.of(weight())
            release()
        found = self.forms[form.suffix, name]
        codes = edit.named(f"{name}.{form.suffix}", lambda: found.codes)
        return [codes, edit.named(f"{name}.scale", lambda: found.scale)]


def quantize(edit: Editor, quant: Quant, store: WeightStore, book: SlotBook | None = None) -> None:
    """Lower every linear and embedding of a graph to the form ``quant`` asks for.

    ``book``: low-rank terms become slots, which are entered in it; without one they are weights
    like all others.
    """
    exact = quant is not Quant.FP32
    _lower_embeddings(edit, store, exact)
    for linear in linears(edit, book.terms(edit) if book is not None else {}):
        if book is not None and linear.first.factor:
            continue
        slot = (
            book.slot(linear, exact and not linear.first.stays_float) if book is not None else None
        )
        whole = _product(edit, linear, quant, store, slot is not None)
        if slot is not None:
            whole = beside(edit, slot, whole, linear.source, linear.first.node, exact)
        lower(edit, linear, whole)
    edit.clean()  # the terms that slots stand for
    if book is not None:
        lower_alone(edit, book)


def _product(
    edit: Editor, linear: Linear, quant: Quant, store: WeightStore, slotted: bool
) -> ir.Value:
    """A linear's product in the form that ``quant`` asks for; ``slotted``: a slot's term is added
    to it.
    """
    role = linear.first.role
    if quant is not Quant.FP32 and linear.first.stays_float:
        store.kept[linear.name] = linear.inputs * linear.outputs
        if not slotted and fits_half(linear):
            half = edit.named(f"{linear.name}.float16", partial(linear.weight, np.float16))
            return linear.product(edit, HALF_LINEAR, [half])
    if quant is Quant.FP32 or linear.first.stays_float:
        return linear.product(
            edit, "MatMul", [edit.named(linear.transposed, linear.weight)], domain=""
        )
    if quant is Quant.INT8 or (role is not None and role.part in (Part.HEAD, Part.EMBEDDING)):
        zero, form = row_form(edit, linear.source)
        weight = store.initializers(edit, Int8Weight, linear.name, linear.weight)
        return linear.product(edit, INT8_LINEAR, [*weight, zero], form)
    weight = store.initializers(edit, Int4Weight, linear.name, linear.weight)
    return linear.product(edit, INT4_LINEAR, weight, {"K": linear.inputs, "N": linear.outputs})


def _lower_embeddings(edit: Editor, store: WeightStore, exact: bool) -> None:
    """Gathers from the embedding read it as the head wants it, ``[D, V]``, so that a tied head
    shares the bytes.

    It has eight bits; in float32 only one that is tied to the head changes.
    """
    heads = (
        {}
        if exact
        else {linear.name: linear for linear in linears(edit, {}) if len(linear.parts) == 1}
    )
    for node in [node for node in edit.graph if node.op_type == "Gather"]:
        table = source_of(node)
        ids = source_of(node, 1)
        role = role_of(table)
        content = constant_of(table)
        shape = sizes_of(ids)
        if role is None or role.part is not Part.EMBEDDING or content is None or shape is None:
            continue
        out = [*shape, content.shape[1]]
        if exact and content.size >= SMALL:
            weight = store.initializers(
                edit, Int8Weight, table.name or "", partial(np.transpose, content)
            )
            if ids.dtype is not ir.DataType.INT32:
                ids = edit.insert(
                    node, "Cast", [ids], shape, ir.DataType.INT32, {"to": int(ir.DataType.INT32)}
                )
            made = edit.insert(
                node, INT8_EMBEDDING, [ids, *weight], out, ir.DataType.FLOAT, {"whole": out}, DOMAIN
            )
            edit.replace(node, made)
        elif (head := heads.get(table.name or "")) is not None:
            stored = edit.named(head.transposed, head.weight)
            flat = edit.reshape(node, ids, (prod(shape),))
            sizes = (content.shape[1], prod(shape))
            columns = edit.insert(
                node, "Gather", [stored, flat], sizes, ir.DataType.FLOAT, {"axis": 1}
            )
            edit.replace(
                node, edit.reshape(node, edit.transpose(node, columns, [1, 0]), tuple(out))
            )


@contextmanager
def simulated(
    model: StreamModel,
    quant: Quant,
    slotted: bool = False,
    keep: bool = True,
    cache_dtype: str = "float32",
) -> Iterator[None]:
    """Within this context linears and the embedding compute what their exported forms compute, up
    to float rounding.

    ``slotted``: low-rank terms beside linears are in slots. Without ``keep`` the model gives up its
    own weights, which saves their memory: afterwards the model still has those of the exported
    forms. ``cache_dtype``: attention rounds keys and values to it.
    """
    if quant is Quant.FP32:
        yield
        return
    backbone = model.backbone
    operators = model.backbone.operators
    eight_bits = (backbone.embed_tokens, backbone.lm_head, model.draft_head)
    with ExitStack() as undo:
        if cache_dtype != "float32":
            rounding = partial(_attend_rounded, operators.attention, getattr(torch, cache_dtype))
            undo.callback(setattr, backbone, "operators", operators)
            backbone.operators = replace(operators, attention=rounding)
        done: set[int] = set()
        own = model.streams.own_terms() if model.streams is not None else []
        downs, floats = (
            _slots(model)
            if slotted
            else (set(), {part for term in own for part in term.children()})
        )
        for part in model.modules():
            if not isinstance(part, (nn.Linear, nn.Embedding)) or part in floats:
                continue
            if part.weight.numel() < SMALL and part not in downs:
                continue
            whole = quant is Quant.INT8 or part in eight_bits or part in downs
            if isinstance(part, nn.Linear):
                undo.enter_context(
                    part.register_forward_pre_hook(partial(_rounded, None if whole else BLOCK))
                )
            weight = part.weight
            if id(weight) in done:
                continue
            done.add(id(weight))
            form = (Int8Weight if whole else Int4Weight).of(weight.detach().float().numpy().T)
            if keep:
                undo.callback(setattr, weight, "data", weight.data)
                weight.data = torch.from_numpy(np.ascontiguousarray(form.dequantized().T)).to(
                    weight.dtype
                )
            else:
                weight.data.copy_(torch.from_numpy(form.dequantized().T))
                release()
        yield


def _attend_rounded(attend: Attention, dtype: torch.dtype, asked: Attending) -> Tensor:
    """Attention over rows as a cache holds them, the new ones included."""
    keys, values = (
        [run.to(dtype).to(run.dtype) for run in runs] for runs in (asked.keys, asked.values)
    )
    return attend(replace(asked, keys=keys, values=values))


def _slots(model: StreamModel) -> tuple[set[nn.Module], set[nn.Module]]:
    """Factors that a slot holds in eight bits, and those that it holds in float32."""
    beside = (part for part in model.modules() if isinstance(part, (LoraLinear, StreamRowAdapter)))
    large = (
        part
        for part in beside
        if isinstance(part.base, nn.Linear) and part.base.weight.numel() >= SMALL
    )
    downs: set[nn.Module] = {part.adapter.down for part in large}
    return downs, low_rank_factors(model) - downs


def _rounded(block: int | None, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    """Each block of values of a row (None: the row) to 255 levels of its largest magnitude, as the
    kernels do.
    """
    x = inputs[0]
    width = x.shape[-1]
    blocks = nn.functional.pad(x, (0, -width % (block or width))).reshape(
        *x.shape[:-1], -1, block or width
    )
    peak = blocks.abs().amax(dim=-1, keepdim=True)
    scale = peak / LEVELS if block else peak * (1 / LEVELS)
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    levels = torch.clamp(torch.round(blocks / safe), -LEVELS - 1, LEVELS)
    return ((levels * scale).reshape(*x.shape[:-1], -1)[..., :width],)
