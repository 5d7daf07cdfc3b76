"""Which weights of a converted Core ML function are compressed and how; what cannot be is said, never skipped.

Weights alone are compressed: activations stay float16, so rows stay independent. One function is compressed at a time,
before functions are merged; equal weights then become equal bytes, which merging stores once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ssdevice.errors import SSDeviceError
from ssdevice.export.calibration.grid import Grid, symmetric
from ssdevice.export.plan import Quant

BLOCK = 32
"""Inputs that share a scale in int4 per block."""
PALETTE_GROUPS = (16, 8, 4, 2, 1)
"""Output channels that share a palette: the first that divides them."""
APP_PARTS = ("_adapter_", "streams_adapters_", "streams_transform_", "streams_identifiers")
"""In the names of weights that an app brings: they are small, and what they cost is what an app costs."""
SMALLEST = 512
"""Elements from which compressing a weight is worth its scales."""


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
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def source(self) -> str:
        """The model's own name of it, as far as conversion kept it."""
        return self.name.removesuffix("_to_fp16").removeprefix("p_").removeprefix("module_model_")


@dataclass(frozen=True)
class WeightPlan:
    """The scheme of every matrix by constant name, and what differs from what was asked."""

    schemes: Mapping[str, Scheme]
    notes: tuple[str, ...]


def matrices(spec: Any) -> list[Weight]:
    """The constant float matrices that linears multiply with or lookups read, of a converted function's protobuf."""
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
    """Decide every weight of a function. ``vocab``: rows of the embedding."""
    schemes: dict[str, Scheme] = {}
    notes: list[str] = []
    for weight in weights:
        scheme, note = _scheme(weight, quant, per_channel, vocab)
        schemes[weight.name] = scheme
        if note:
            notes.append(note)
    return WeightPlan(schemes, tuple(notes))


def _scheme(weight: Weight, quant: Quant, per_channel: bool, vocab: int) -> tuple[Scheme, str]:
    linear, lookup = ("linear", "weight") in weight.readers, ("gather", "x") in weight.readers
    if quant is Quant.FP16 or (lookup and weight.shape[0] != vocab):  # tables of positions are exact or wrong
        return Scheme.FLOAT16, ""
    if any(part in weight.name for part in APP_PARTS):
        return Scheme.FLOAT16, ""
    if weight.elements < SMALLEST:
        return Scheme.FLOAT16, ""
    if lookup or quant is Quant.INT8:
        # A head that shares its weight with the embedding stays what the embedding is: one copy.
        return Scheme.INT8, ""
    assert linear
    if quant is Quant.PALETTE4:
        return Scheme.PALETTE4, ""
    if per_channel:
        return Scheme.INT4_CHANNEL, ""
    if weight.shape[1] % BLOCK:
        note = f"{weight.source} has {weight.shape[1]} inputs, no multiple of {BLOCK}: {Scheme.INT8}, not int4"
        return Scheme.INT8, note
    return Scheme.INT4_BLOCK, ""


def int4_grid(shape: Sequence[int], per_channel: bool) -> Grid | None:
    """What ``compress`` rounds a linear of the layers to in int4; None: ``plan_weights`` stores it otherwise."""
    outputs, inputs = shape
    if outputs * inputs < SMALLEST or (not per_channel and inputs % BLOCK):
        return None
    return Grid(None if per_channel else BLOCK, symmetric, -7, 7)


def compress(model: Any, plan: WeightPlan, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """The model with its weights stored as planned. Raises SSDeviceError if a weight came out otherwise."""
    import coremltools.optimize.coreml as cto

    linear, palettes = {}, {}
    for name, scheme in plan.schemes.items():
        if scheme is Scheme.INT8:
            linear[name] = cto.OpLinearQuantizerConfig(
                mode="linear_symmetric", dtype="int8", granularity="per_channel", weight_threshold=0
            )
        elif scheme is Scheme.INT4_CHANNEL:
            linear[name] = cto.OpLinearQuantizerConfig(
                mode="linear_symmetric", dtype="int4", granularity="per_channel", weight_threshold=0
            )
        elif scheme is Scheme.INT4_BLOCK:
            linear[name] = cto.OpLinearQuantizerConfig(
                mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=BLOCK, weight_threshold=0
            )
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


STORED = {
    Scheme.INT8: "constexpr_blockwise_shift_scale",
    Scheme.INT4_BLOCK: "constexpr_blockwise_shift_scale",
    Scheme.INT4_CHANNEL: "constexpr_blockwise_shift_scale",
    Scheme.PALETTE4: "constexpr_lut_to_dense",
}


def _check(spec: Any, plan: WeightPlan) -> None:
    """coremltools passes over a weight it cannot compress with a line in a log; here that is an error."""
    (function,) = spec.mlProgram.functions.values()
    (block,) = function.block_specializations.values()
    kinds = {operation.outputs[0].name: operation.type for operation in block.operations if operation.outputs}
    for name, scheme in plan.schemes.items():
        expected = STORED.get(scheme)
        if expected is None:
            continue
        found = [kind for output, kind in kinds.items() if output == name or output.startswith(f"{name}_")]
        if expected not in found:
            raise SSDeviceError(
                f"weight {name} was to be stored as {scheme}; coremltools left it as {found or 'nothing'}"
            )
