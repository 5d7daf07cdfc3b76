"""The weights of a converted Core ML function: their names, how each is compressed, and the
compression.

Only weights are compressed: activations stay float16, so rows stay independent. A weight that
cannot be compressed as requested is noted, never skipped silently. Functions are compressed one by
one before they are joined; equal weights become equal bytes, which are stored once.
"""

import math
from collections.abc import Hashable, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from ssdevice.config import Schedule
from ssdevice.errors import SSDeviceError
from ssdevice.export.calibration.grid import Grid, symmetric
from ssdevice.export.exporter import Exporter
from ssdevice.export.mlprogram.options import CoreMLOptions
from ssdevice.export.plan import ExportPlan, Quant

PREFIX = "p_module_model_"
"""The prefix that torch.export and coremltools add to a parameter's name."""
HALF = "_to_fp16"
"""The suffix that coremltools' half-precision pass adds; compression adds more after it."""
CONST = "const"
ONLY_WEIGHTS = "only weights are compressed: activations are float16"
"""A note of compressed bundles."""
BLOCK = 32
"""Inputs that share a scale in int4 per block."""
PALETTE_GROUPS = (16, 8, 4, 2, 1)
"""Numbers of output channels that may share a palette: the first that divides all channels is used."""
APP_PARTS = ("_adapter_", "model_streams_")
"""Parts of the names of an app's own weights, which are small and stay float16."""
SMALLEST = 512
"""Least number of elements for which compression saves more than its scales cost."""
LOOKUP = ("gather", "x")
"""The operation, and its parameter, that read a table."""


class Scheme(StrEnum):
    """How one weight is stored."""

    FLOAT16 = "float16"
    INT8 = "int8 per channel"
    INT4_BLOCK = "int4 per block of 32"
    INT4_CHANNEL = "int4 per channel"
    PALETTE4 = "4-bit palettes"


def weight_key(operation: str, output: str) -> str | None:
    """The converted name of the parameter that an operation returns; None for other operations."""
    key, _, rest = output.lower().removeprefix(PREFIX).partition(HALF)
    return key if operation.startswith("constexpr_") or (operation == CONST and not rest) else None


def short_name(key: str) -> str:
    """The name of a parameter's value in a compact program."""
    return f"w{sha256(key.encode()).hexdigest()[:8]}"


class Weight(NamedTuple):
    """A constant matrix of a program; ``lookup``: it is a table, which a gather reads."""

    name: str
    shape: tuple[int, ...]
    lookup: bool = False


def _matrix(output: Any) -> Weight | None:
    """A constant matrix that linears or lookups of a program read; None for another constant."""
    reads = (
        (reader.op_type, *given) for reader in output.child_ops for given in reader.inputs.items()
    )
    uses = {(kind, parameter) for kind, parameter, value in reads if value is output}
    read = output.rank == 2 and uses & {LOOKUP, ("linear", "weight")}
    return Weight(output.name, output.shape, LOOKUP in uses) if read else None


def scheme_of(weight: Weight, quant: Quant, per_channel: bool, vocab: int) -> Scheme:
    """How a weight is stored. ``vocab``: rows of the embedding."""
    positions = weight.lookup and weight.shape[0] != vocab  # a table of positions must be exact
    own = any(part in weight.name for part in APP_PARTS)
    if quant is Quant.FP16 or positions or own or math.prod(weight.shape) < SMALLEST:
        return Scheme.FLOAT16
    if weight.lookup or quant is Quant.INT8:
        return (
            Scheme.INT8
        )  # also a head that shares its weight with the embedding, so that there is one copy
    if quant is Quant.PALETTE4:
        return Scheme.PALETTE4
    if per_channel:
        return Scheme.INT4_CHANNEL
    return Scheme.INT8 if weight.shape[1] % BLOCK else Scheme.INT4_BLOCK


Compressed = dict[Hashable, Any]
"""What weights became, by scheme and contents: functions that share a weight compress and hold it
once.
"""


def int4_grid(shape: Sequence[int], per_channel: bool) -> Grid | None:
    """What ``compress`` rounds a linear of the layers to in int4; None: ``scheme_of`` stores it
    otherwise.
    """
    outputs, inputs = shape
    if outputs * inputs < SMALLEST or (not per_channel and inputs % BLOCK):
        return None
    return Grid(None if per_channel else BLOCK, symmetric, -7, 7)


class MLProgramExporter(Exporter):
    """What an exporter of ML programs says of itself; see ``Exporter``."""

    bits = {Quant.FP16: 16.0, Quant.INT8: 8.1, Quant.INT4: 5.0, Quant.PALETTE4: 4.5}  # noqa: RUF012
    schedule = Schedule.FUSED
    chooses = True
    calibrates = frozenset({Quant.INT4})

    def grid(self, plan: ExportPlan, linear: nn.Linear, factor: bool) -> Grid | None:
        return (
            None
            if factor
            else int4_grid(linear.weight.shape, plan.options.chosen(CoreMLOptions).per_channel)
        )


def compress(
    program: Any, quant: Quant, per_channel: bool, vocab: int, known: Compressed
) -> tuple[str, ...]:
    """Store the weights of a function's program in a precision; returns notes on deviations from
    it.

    ``vocab``: see ``scheme_of``. Raises SSDeviceError if coremltools cannot.
    """
    from coremltools.converters.mil import Builder as mb

    notes = []
    (function,) = program.functions.values()
    with function:
        for constant in [
            operation for operation in function.operations if operation.op_type == CONST
        ]:
            before = constant.outputs[0]
            if not isinstance(before.val, np.ndarray) or before.val.size < SMALLEST:
                continue
            weight = _matrix(before)
            scheme = (
                Scheme.FLOAT16 if weight is None else scheme_of(weight, quant, per_channel, vocab)
            )
            if (
                quant is Quant.INT4
                and scheme is Scheme.INT8
                and weight is not None
                and not weight.lookup
            ):
                name = weight.name.removesuffix(HALF).removeprefix(PREFIX)
                inputs = weight.shape[1]
                notes.append(
                    f"{name} has {inputs} inputs, not a multiple of {BLOCK}: {Scheme.INT8}, not int4"
                )
            key = (
                scheme,
                str(before.dtype),
                before.shape,
                sha256(np.ascontiguousarray(before.val).data).digest(),
            )
            if scheme is Scheme.FLOAT16:
                values = known.setdefault(key, before.val)
                for var in (before, constant.val):
                    var._sym_val.val = values
                continue
            if key not in known:
                known[key] = _compressed(before.val, scheme)
            if known[key] is None:
                raise SSDeviceError(f"weight {before.name} cannot be stored as {scheme}")
            if scheme is Scheme.PALETTE4:
                kind = "constexpr_lut_to_dense"
                suffix = "palettized"
                names = ("indices", "lut")
            else:
                kind = "constexpr_blockwise_shift_scale"
                suffix = "quantized"
                names = ("data", "scale")
            parameters = {name: getattr(known[key], name) for name in names}
            after = getattr(mb, kind)(
                **parameters, before_op=constant, name=f"{constant.name}_{suffix}"
            )
            function.replace_uses_of_var_after_op(
                anchor_op=constant, old_var=before, new_var=after, no_check_var_types=True
            )
            function.remove_ops([constant])
    return tuple(notes)


def _compressed(values: Any, scheme: Scheme) -> Any:
    """What coremltools makes of a matrix; None: it cannot."""
    from coremltools.optimize.coreml._quantization_passes import (
        linear_quantize_weights,
        palettize_weights,
    )

    if scheme is Scheme.PALETTE4:
        group = next(size for size in PALETTE_GROUPS if len(values) % size == 0)
        return palettize_weights.blockwise_compress(values, "KMEANS", 4, [group, 0])
    # 0: the axis
    bits = 8 if scheme is Scheme.INT8 else 4
    blocks = [1, BLOCK if scheme is Scheme.INT4_BLOCK else 0]
    return linear_quantize_weights.blockwise_compress(
        values, bits, "LINEAR_SYMMETRIC", True, blocks
    )
