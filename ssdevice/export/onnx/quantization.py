"""Quantized linears and embeddings for ONNX Runtime.

int8: weights per output column, symmetric; inputs per row, symmetric around 128 in uint8 (signed
inputs take a path that is many times slower on x86). Rows never share a scale, so a draft row
cannot change a verified one. int4: blocks of 32 along the inputs for linears; embedding and head
stay int8, where four bits cost most accuracy and save least time.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from ssdevice.adapters.storage import LEVELS, int8_factors
from ssdevice.export.calibration.grid import Grid, Rounded, lowest
from ssdevice.export.onnx.editor import Editor, constant_of, sizes_of, source_of, stored_of
from ssdevice.export.onnx.functions import BLOCK, row_form
from ssdevice.export.onnx.linears import SMALL, Array, Linear, fits_half, linears, lower
from ssdevice.export.onnx.slots import SlotBook, beside, lower_alone
from ssdevice.export.plan import Quant
from ssdevice.export.weights import (
    FLOAT32,
    KEPT,
    Part,
    Rows,
    Scheme,
    Schemes,
    Stored,
    multiplies,
    stored,
)
from ssdevice.model.attention import Attending, Attention
from ssdevice.model.mapped import release
from ssdevice.model.step import StreamModel
from ssdevice.runtime.onnx.kernels import (
    DOMAIN,
    HALF_LINEAR,
    INT4_LINEAR,
    INT8_EMBEDDING,
    INT8_LINEAR,
)

Layout = tuple[Array, Array]
"""Codes and scales as operators take them."""


def _paired(weight: Tensor) -> Rounded:
    codes, scale = int8_factors(weight.numpy().T)
    return Rounded(torch.from_numpy(codes.T)[:, None], torch.from_numpy(scale)[:, None], len(codes))


INT8 = Scheme("int8", 8, _paired)
"""One scale per output; slots hold factors in the same form, which hosts make of them."""
INT4 = Scheme.on("int4", 4, Grid(BLOCK, lowest, -8, 7, torch.bfloat16, empty=0.0))
"""Blocks of 32; inputs that are no multiple of 32 are padded with zeros.

The value of largest magnitude in a block maps to -8, so that all sixteen codes are used. Scales are
bfloat16 numbers: our kernel reads a tenth less for it. A block of zeros has scale 0: kernels that
subtract the zero point from the sum leave a rounding of the block's inputs otherwise.
"""


def schemes(quant: Quant) -> Schemes:
    """The table of this target: what a graph's products and its embedding are stored as."""
    if quant is Quant.FP32:
        return Schemes(FLOAT32, {Part.EMBEDDING: FLOAT32, Part.OWN_FACTOR: KEPT}, least=SMALL)
    ends: Rows = {Part.EMBEDDING: INT8, Part.HEAD: INT8, Part.DRAFT_HEAD: INT8}
    usual = INT8 if quant is Quant.INT8 else INT4
    return Schemes(usual, {**ends, Part.OWN_FACTOR: KEPT}, least=SMALL, slot=INT8)


def int8_layout(rounded: Rounded) -> Layout:
    """``codes [K, N]`` int8 and ``scale [N]`` float32."""
    return rounded.codes[:, 0].T.numpy(), rounded.scale[:, 0].numpy()


def int4_layout(rounded: Rounded) -> Layout:
    """``codes [N, K / 32, 16]`` uint8, low nibble first and zero at 8, and ``scale [N, K / 32]``
    float32.
    """
    codes = (rounded.codes + 8).numpy().astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, rounded.scale.numpy()


def initializers(edit: Editor, name: str, parts: Sequence[Stored]) -> list[ir.Value]:
    """Codes and scales in a graph, of weights ``[N, K]`` of one scheme side by side."""
    scheme = parts[0].scheme
    layout = int8_layout if scheme is INT8 else int4_layout

    def joined(index: int) -> Array:
        arrays = [layout(part.rounded)[index] for part in parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, COLUMNS[scheme][index])

    codes = edit.named(f"{name}.{scheme.name}", partial(joined, 0))
    return [codes, edit.named(f"{name}.scale", partial(joined, 1))]


COLUMNS = {INT8: (1, 0), INT4: (0, 0)}
"""Which axis of codes and of scales is the outputs."""
Kept = dict[str, int]
"""Weights that stay floats in a quantized graph: name -> elements."""


def quantize(edit: Editor, quant: Quant, kept: Kept, book: SlotBook | None = None) -> None:
    """Lower every linear and embedding of a graph to the form that its scheme says.

    ``kept`` receives linears that stay floats although ``quant`` is for integers. ``book``:
    low-rank terms become slots, which are entered in it; without one they are weights like all
    others.
    """
    exact = quant is not Quant.FP32
    _lower_embeddings(edit, exact)
    for linear in linears(edit, book.terms(edit) if book is not None else {}):
        if book is not None and linear.first.factor:
            continue
        slot = None
        if book is not None:
            slot = book.slot(linear, exact and not linear.stays_float)
        if exact and linear.stays_float:
            kept[linear.name] = linear.inputs * linear.outputs
        whole = _product(edit, linear, exact and slot is None)
        if slot is not None:
            whole = beside(edit, slot, whole, linear.source, linear.first.node, exact)
        lower(edit, linear, whole)
    edit.clean()  # the terms that slots stand for
    if book is not None:
        lower_alone(edit, book)


def _product(edit: Editor, linear: Linear, halves: bool) -> ir.Value:
    """A linear's product in the form of its scheme.

    ``halves``: one that stays float may be stored in float16, if that loses nothing.
    """
    scheme = linear.first.stored.scheme
    if scheme.floats and halves and fits_half(linear):
        half = edit.named(f"{linear.name}.float16", partial(linear.weight, np.float16))
        return linear.product(edit, HALF_LINEAR, [half])
    if scheme.floats:
        weight = edit.named(linear.transposed, linear.weight)
        return linear.product(edit, "MatMul", [weight], domain="")
    stored_parts = [part.stored for part in linear.parts]
    if scheme is INT4:
        given = initializers(edit, linear.name, stored_parts)
        return linear.product(edit, INT4_LINEAR, given, {"K": linear.inputs, "N": linear.outputs})
    zero, form = row_form(edit, linear.source)
    given = initializers(edit, linear.name, stored_parts)
    return linear.product(edit, INT8_LINEAR, [*given, zero], form)


def _lower_embeddings(edit: Editor, exact: bool) -> None:
    """Gathers from the embedding read it as the head wants it, ``[D, V]``, so that a tied head
    shares the bytes.

    In float32 only one that is tied to the head changes.
    """
    heads = {}
    if not exact:
        heads = {linear.name: linear for linear in linears(edit, {}) if len(linear.parts) == 1}
    for node in [node for node in edit.graph if node.op_type == "Gather"]:
        table = source_of(node)
        ids = source_of(node, 1)
        stored = stored_of(table)
        content = constant_of(table)
        shape = sizes_of(ids)
        if stored is None or stored.role.part != Part.EMBEDDING or content is None or shape is None:
            continue
        name = table.name or ""
        out = [*shape, content.shape[1]]
        if not stored.scheme.floats:
            weight = initializers(edit, name, [stored])
            if ids.dtype is not ir.DataType.INT32:
                to = {"to": int(ir.DataType.INT32)}
                ids = edit.insert(node, "Cast", [ids], shape, ir.DataType.INT32, to)
            given = [ids, *weight]
            float32 = ir.DataType.FLOAT
            made = edit.insert(node, INT8_EMBEDDING, given, out, float32, {"whole": out}, DOMAIN)
            edit.replace(node, made)
        elif name in heads:
            head = heads[name]
            turned = edit.named(head.transposed, head.weight)
            flat = edit.reshape(node, ids, (prod(shape),))
            sizes = (content.shape[1], prod(shape))
            columns = edit.insert(
                node, "Gather", [turned, flat], sizes, ir.DataType.FLOAT, {"axis": 1}
            )
            rows = edit.transpose(node, columns, [1, 0])
            edit.replace(node, edit.reshape(node, rows, tuple(out)))


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
    with ExitStack() as undo:
        if cache_dtype != "float32":
            rounding = partial(_attend_rounded, operators.attention, getattr(torch, cache_dtype))
            undo.callback(setattr, backbone, "operators", operators)
            backbone.operators = replace(operators, attention=rounding)
        for one in stored(model, schemes(quant), slotted):
            if one.scheme.floats:
                continue
            block = one.scheme.grid.block if one.scheme.grid is not None else None
            for module in one.modules:
                if multiplies(module):
                    hook = partial(_rounded, block)
                    undo.enter_context(module.register_forward_pre_hook(hook))
            values = one.round().dequantized()
            if keep:
                undo.callback(setattr, one.weight, "data", one.weight.data)
                one.weight.data = values.to(one.weight.dtype).contiguous()
            else:
                one.weight.data.copy_(values)
                release()
        yield


def _attend_rounded(attend: Attention, dtype: torch.dtype, asked: Attending) -> Tensor:
    """Attention over rows as a cache holds them, the new ones included."""
    keys = [run.to(dtype).to(run.dtype) for run in asked.keys]
    values = [run.to(dtype).to(run.dtype) for run in asked.values]
    return attend(replace(asked, keys=keys, values=values))


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
