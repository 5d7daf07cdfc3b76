"""Weights of the ExecuTorch target: linears with 8-bit activations (8da8w, 8da4w), weight-only
embeddings.

Rows are quantized separately (one scale per token), so no row can see another through its scale.
Linears are never quantized weight-only: such a graph is refused or, worse, lowers without an error
and computes something else.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ssdevice.export.calibration.grid import Grid, unclipped
from ssdevice.export.plan import INT8_HEAD, Quant
from ssdevice.export.weights import (
    FLOAT32,
    KEPT,
    Part,
    Rows,
    Scheme,
    Schemes,
    floats_note,
    multiplies,
    stored,
    unlisted,
)
from ssdevice.memory import free_memory
from ssdevice.model.mapped import mapped, released_after
from ssdevice.model.mapped import release as release_mapped
from ssdevice.model.step import StreamModel

GROUP = 32
"""Weights that share a scale in 4 bits."""
INT8 = Scheme("int8", 8)
"""One scale per row; torchao rounds. Inputs of products have eight bits per row in both schemes."""
INT4 = Scheme("int4", 4, grid=Grid(GROUP, unclipped, -8, 7))
"""torchao rounds to values of this grid."""


def schemes(quant: Quant) -> Schemes:
    """The table of this target. Low-rank factors stay float32: they are small, and what they add is
    smaller than the rounding of their input.
    """
    if quant is Quant.FP32:
        return Schemes(FLOAT32)
    ends: Rows = {Part.EMBEDDING: INT8, Part.HEAD: INT8, Part.DRAFT_HEAD: INT8}
    factors: Rows = {Part.FACTOR: KEPT, Part.OWN_FACTOR: KEPT}
    return Schemes(INT8 if quant is Quant.INT8 else INT4, {**ends, **factors}, uneven=INT8)


def quantized(model: StreamModel, quant: Quant) -> tuple[StreamModel, tuple[str, ...]]:
    """A copy of the model with linears and embedding that compute in torch what the lowered graph
    computes, with notes on deviations from the requested precision.

    torchao has tensors of its own, which it puts into each module that holds a weight: a tied head
    and the embedding have one each.
    """
    if quant is Quant.FP32:
        return model, ()
    # The new modules share what is not quantized; each weight that is, is replaced below.
    model = copy.deepcopy(
        model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    )
    table = stored(model, schemes(quant))
    for one in table:
        for module in one.modules if not one.scheme.floats else ():
            _store(module, one.scheme)
            release_mapped()
    notes = [INT8_HEAD] if quant is Quant.INT4 else []
    uneven = [one.owner for one in table if one.uneven]
    if uneven:
        notes.append(
            f"{len(uneven)} linears are int8: their inputs are not a multiple of {GROUP} "
            f"(first: {uneven[0]})"
        )
    return model, (*notes, *floats_note(unlisted(table)))


def _store(module: nn.Module, scheme: Scheme) -> None:
    """Replace a module's weight by torchao's tensor."""
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerAxis
    from torchao.quantization.quant_api import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
    )

    if not multiplies(module):
        rows = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
        quantize_(module, rows, filter_fn=lambda part, _: part is module)
        return
    own = module.weight.detach()  # not the one that a tied head shares
    module.weight = nn.Parameter(own, requires_grad=False)
    if scheme is INT4:
        four_bits(module)
        return
    eight = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8, weight_granularity=PerAxis(0)
    )
    quantize_(module, eight)


def release(model: StreamModel, kept: StreamModel) -> None:
    """Release the matrices that ``kept``, the quantized copy of a model, does not share with it."""
    shared = {id(tensor) for tensor in kept.parameters()}
    for tensor in model.parameters():
        if tensor.dim() > 1 and id(tensor) not in shared:
            tensor.data = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def map_codes(model: StreamModel, folder: Path) -> None:
    """Map the codes of quantized weights from files in ``folder``."""
    for part in model.modules():
        if (codes := getattr(getattr(part, "weight", None), "qdata", None)) is not None:
            codes.data = mapped(codes, folder, codes.dtype)
            release_mapped()


@contextmanager
def held_values(model: StreamModel, folder: Path) -> Iterator[None]:
    """In this context the values of quantized weights are computed once, not in every call.

    It cannot be lowered.

    They are mapped from files in ``folder``, and leave memory whenever a layer or the head has run.
    """
    weights = [getattr(part, "weight", None) for part in model.modules()]
    held = [weight for weight in weights if weight is not None and hasattr(weight, "qdata")]
    for weight in held:
        values = mapped(weight.dequantize(), folder)
        weight.dequantize = lambda values=values: values
        release_mapped()
    try:
        with released_after((*model.backbone.layers, model.backbone.lm_head)):
            yield
    finally:
        for weight in held:
            del weight.dequantize  # the class's method is left
        free_memory()


def four_bits(part: nn.Module) -> None:
    """Quantize a linear to 8-bit rows and 4-bit weights."""
    from torchao.quantization import MappingType, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig

    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        weight_granularity=PerGroup(GROUP),
        # Rounding once more must change nothing; with plain SYMMETRIC it does, since its scale is
        # 7.5 of the range.
        weight_mapping_type=MappingType.SYMMETRIC_NO_CLIPPING_ERR,
    )
    quantize_(part, config)
    scale = cast(Tensor, cast(Any, part.weight).scale)
    scale.copy_(scale.bfloat16())  # as programs store it
