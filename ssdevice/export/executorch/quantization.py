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
from ssdevice.memory import free_memory
from ssdevice.model.mapped import mapped, released_after
from ssdevice.model.mapped import release as release_mapped
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import low_rank_factors

GROUP = 32
"""Weights that share a scale in 4 bits."""
INT4_GRID = Grid(GROUP, unclipped, -8, 7)
"""What ``quantized`` rounds to in 4 bits."""


def quantized(model: StreamModel, quant: Quant) -> tuple[StreamModel, tuple[str, ...]]:
    """A copy of the model with linears and embedding that compute in torch what the lowered graph
    computes.

    With notes on deviations from the requested precision. Low-rank adapters stay float32: they are
    small, and what they add is smaller than the rounding of their input.
    """
    if quant is Quant.FP32:
        return model, ()
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerAxis
    from torchao.quantization.quant_api import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
    )

    # The new modules share what is not quantized; each weight that is, is replaced below.
    model = copy.deepcopy(
        model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    )
    eight = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8, weight_granularity=PerAxis(0)
    )
    rows = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    backbone = model.backbone
    uneven = []
    low_rank = low_rank_factors(model)
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and part not in low_rank:
            part.weight = nn.Parameter(
                part.weight.detach(), requires_grad=False
            )  # unties a tied head
            whole = quant is Quant.INT8 or part in (backbone.lm_head, model.draft_head)
            if not whole and part.in_features % GROUP:
                uneven.append(name)
                whole = True
            if whole:
                quantize_(part, eight)
            else:
                four_bits(part)
            release_mapped()
    if isinstance(backbone.embed_tokens, nn.Embedding):
        quantize_(
            backbone.embed_tokens, rows, filter_fn=lambda part, _: isinstance(part, nn.Embedding)
        )
    notes = [INT8_HEAD] if quant is Quant.INT4 else []
    if uneven:
        notes.append(
            f"{len(uneven)} linears are int8: their inputs are not a multiple of {GROUP} (first: {uneven[0]})"
        )
    return model, tuple(notes)


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
