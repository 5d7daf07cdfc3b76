"""Decides how the weights of a converted Core ML function are compressed, and compresses them.

Only weights are compressed: activations stay float16, so rows stay independent. A weight that cannot be compressed as
requested is noted, never skipped silently. Functions are compressed one by one before they are merged; equal weights
become equal bytes, which merging stores once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ssdevice.errors import SSDeviceError
from ssdevice.export.calibration.grid import Grid, symmetric
from ssdevice.export.plan import Quant

BITS: Mapping[Quant, float] = {Quant.FP16: 16.0, Quant.INT8: 8.1, Quant.INT4: 5.0, Quant.PALETTE4: 4.5}
"""Bits of a weight on disk, with its scales."""
ONLY_WEIGHTS = "only weights are compressed: activations are float16"
"""A note of compressed bundles."""
BLOCK = 32
"""Inputs that share a scale in int4 per block."""
PALETTE_GROUPS = (16, 8, 4, 2, 1)
"""Numbers of output channels that may share a palette: the first that divides all channels is used."""
APP_PARTS = ("_adapter_", "streams_adapters_", "streams_transform_", "streams_identifiers")
"""Parts of the names of an app's own weights, which are small and stay float16."""
SMALLEST = 512
"""Least number of elements for which compression saves more than its scales cost."""


class Scheme(StrEnum):
    """How one weight is stored."""

    FLOAT16 = "float16"
    INT8 = "int8 per channel"
    INT4_BLOCK = "int4 per block of 32"
    INT4_CHANNEL = "int4 per channel"
    PALETTE4 = "4-bit palettes"


@dataclass(frozen=True)
class Weight:
    """A constant of a program, its shape, and the (operation, parameter) pairs that read it."""

    name: str
    shape: tuple[int, ...]
    readers: tuple[tuple[str, str], ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def source(self) -> str:
        """Its name in the model, as far as conversion kept it."""
        return self.name.removesuffix("_to_fp16").removeprefix("p_").removeprefix("module_model_")


@dataclass(frozen=True)
class WeightPlan:
    """The scheme of every matrix by the name of its constant, and notes on deviations from the request."""

    schemes: Mapping[str, Scheme]
    notes: tuple[str, ...]


def matrices(spec: Any) -> list[Weight]:
    """The constant matrices that linears or lookups read, in the protobuf of a converted function."""
    (function,) = spec.mlProgram.functions.values()
    (block,) = function.block_specializations.values()
    readers: dict[str, list[tuple[str, str]]] = {}
    for operation in block.operations:
        for parameter, argument in operation.inputs.items():
            for binding in argument.arguments:
                readers.setdefault(binding.name, []).append((operation.type, parameter))
    found = []
    for operation in block.operations:
        if operation.type != "const":
            continue
        output = operation.outputs[0]
        tensor = output.type.tensorType
        shape = tuple(int(d.constant.size) for d in tensor.dimensions)
        uses = tuple(readers.get(output.name, ()))
        if len(shape) == 2 and any(use in (("linear", "weight"), ("gather", "x")) for use in uses):
            found.append(Weight(output.name, shape, uses))
    return found


def plan_weights(weights: Sequence[Weight], quant: Quant, per_channel: bool, vocab: int) -> WeightPlan:
    """Choose the scheme of every weight of a function. ``vocab``: rows of the embedding."""
    schemes: dict[str, Scheme] = {}
    notes = []
    for weight in weights:
        schemes[weight.name] = scheme = _scheme(weight, quant, per_channel, vocab)
        if scheme is Scheme.INT4_BLOCK and weight.shape[1] % BLOCK:
            schemes[weight.name] = Scheme.INT8
            inputs = f"{weight.shape[1]} inputs, not a multiple of {BLOCK}"
            notes.append(f"{weight.source} has {inputs}: {Scheme.INT8}, not int4")
    return WeightPlan(schemes, tuple(notes))


def _scheme(weight: Weight, quant: Quant, per_channel: bool, vocab: int) -> Scheme:
    lookup = ("gather", "x") in weight.readers
    positions = lookup and weight.shape[0] != vocab  # a table of positions must be exact
    own = any(part in weight.name for part in APP_PARTS)
    if quant is Quant.FP16 or positions or own or weight.elements < SMALLEST:
        return Scheme.FLOAT16
    if lookup or quant is Quant.INT8:
        return Scheme.INT8  # also a head that shares its weight with the embedding, so that there is one copy
    if quant is Quant.PALETTE4:
        return Scheme.PALETTE4
    return Scheme.INT4_CHANNEL if per_channel else Scheme.INT4_BLOCK


LINEAR: Mapping[Scheme, Mapping[str, Any]] = {
    Scheme.INT8: {"dtype": "int8", "granularity": "per_channel"},
    Scheme.INT4_CHANNEL: {"dtype": "int4", "granularity": "per_channel"},
    Scheme.INT4_BLOCK: {"dtype": "int4", "granularity": "per_block", "block_size": BLOCK},
}


def int4_grid(shape: Sequence[int], per_channel: bool) -> Grid | None:
    """What ``compress`` rounds a linear of the layers to in int4; None: ``plan_weights`` stores it otherwise."""
    outputs, inputs = shape
    if outputs * inputs < SMALLEST or (not per_channel and inputs % BLOCK):
        return None
    return Grid(None if per_channel else BLOCK, symmetric, -7, 7)


def compress(model: Any, plan: WeightPlan, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """The model with its weights stored as planned. Raises SSDeviceError if a weight is stored otherwise."""
    import coremltools.optimize.coreml as cto

    linear, palettes = {}, {}
    for name, scheme in plan.schemes.items():
        if scheme in LINEAR:
            linear[name] = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0, **LINEAR[scheme])
        elif scheme is Scheme.PALETTE4:
            group = next(size for size in PALETTE_GROUPS if shapes[name][0] % size == 0)
            palettes[name] = cto.OpPalettizerConfig(
                mode="kmeans", nbits=4, granularity="per_grouped_channel", group_size=group, weight_threshold=0
            )
    if linear:
        model = cto.linear_quantize_weights(model, cto.OptimizationConfig(op_name_configs=linear))
    if palettes:
        model = cto.palettize_weights(model, cto.OptimizationConfig(op_name_configs=palettes))
    if linear or palettes:
        _check(model.get_spec(), plan)
    return model


def _check(spec: Any, plan: WeightPlan) -> None:
    """Raise SSDeviceError for a weight that coremltools did not compress, for which it only writes a log message."""
    (function,) = spec.mlProgram.functions.values()
    (block,) = function.block_specializations.values()
    kinds = {operation.outputs[0].name: operation.type for operation in block.operations if operation.outputs}
    for name, scheme in plan.schemes.items():
        if scheme is Scheme.FLOAT16:
            continue
        expected = "constexpr_blockwise_shift_scale" if scheme in LINEAR else "constexpr_lut_to_dense"
        found = [kind for output, kind in kinds.items() if output == name or output.startswith(f"{name}_")]
        if expected not in found:
            raise SSDeviceError(
                f"weight {name} should be stored as {scheme}, but coremltools left it as {found or 'nothing'}"
            )
