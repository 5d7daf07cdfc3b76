"""The weights of a converted Core ML function: their names, how each is compressed, and the
compression.

Only weights are compressed: activations stay float16, so rows stay independent. A weight that
cannot be compressed as requested is noted, never skipped silently. Functions are compressed one by
one before they are joined; equal weights become equal bytes, which are stored once.
"""

import re
from collections.abc import Hashable, Iterable
from hashlib import sha256
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from ssdevice.config import Schedule
from ssdevice.errors import SSDeviceError
from ssdevice.export.calibration.grid import Grid, symmetric
from ssdevice.export.exporter import Exporter
from ssdevice.export.mlprogram.options import CoreMLOptions
from ssdevice.export.plan import ExportPlan, Quant
from ssdevice.export.weights import Part, Rows, Scheme, Schemes, Stored

MODEL = "module.model."
"""What the forms of the functions put before a parameter's name."""
PREFIX = "p_module_model_"
"""What torch.export puts before the name of a model's parameter."""
HALF = "_to_fp16"
"""The suffix that coremltools' half-precision pass adds; compression adds more after it."""
CONST = "const"
ONLY_WEIGHTS = "only weights are compressed: activations are float16"
"""A note of compressed bundles."""
BLOCK = 32
"""Inputs that share a scale in int4 per block."""
PALETTE_GROUPS = (16, 8, 4, 2, 1)
"""Numbers of output channels that may share a palette: the first that divides all is used."""
SMALLEST = 512
"""Least number of elements for which compression saves more than its scales cost."""
FLOAT16 = Scheme("float16", 16)
INT8 = Scheme("int8 per channel", 8)
INT4_BLOCK = Scheme("int4 per block of 32", 4, grid=Grid(BLOCK, symmetric, -7, 7))
INT4_CHANNEL = Scheme("int4 per channel", 4, grid=Grid(None, symmetric, -7, 7))
PALETTE4 = Scheme("4-bit palettes", 4)
"""coremltools rounds in all of them."""


def schemes(quant: Quant, per_channel: bool) -> Schemes:
    """The table of ML programs. An app's own weights are small and stay float16.

    A head that is tied to the embedding counts as it, so that there is one copy.
    """
    if quant is Quant.FP16:
        return Schemes(FLOAT16, kept=FLOAT16)
    own: Rows = {Part.FACTOR: FLOAT16, Part.OWN_FACTOR: FLOAT16, Part.DRAFT: FLOAT16}
    int4 = INT4_CHANNEL if per_channel else INT4_BLOCK
    usual = {Quant.INT8: INT8, Quant.INT4: int4, Quant.PALETTE4: PALETTE4}[quant]
    rows: Rows = {**own, Part.EMBEDDING: INT8}
    return Schemes(usual, rows, kept=FLOAT16, least=SMALLEST, uneven=INT8)


def key_of(name: str) -> str:
    """A parameter's name after conversion."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name).lower()


def weight_key(operation: str, output: str) -> str | None:
    """The converted name of the parameter that an operation returns; None for other operations."""
    key, _, rest = output.lower().removeprefix(PREFIX).partition(HALF)
    return key if operation.startswith("constexpr_") or (operation == CONST and not rest) else None


def short_name(key: str) -> str:
    """The name of a parameter's value in a compact program."""
    return f"w{sha256(key.encode()).hexdigest()[:8]}"


class MLProgramExporter(Exporter):
    """What an exporter of ML programs says of itself; see ``Exporter``."""

    bits = {Quant.FP16: 16.0, Quant.INT8: 8.1, Quant.INT4: 5.0, Quant.PALETTE4: 4.5}  # noqa: RUF012
    schedule = Schedule.FUSED
    chooses = True
    calibrates = frozenset({Quant.INT4})

    def schemes(self, plan: ExportPlan) -> Schemes:
        return schemes(plan.options.quant, plan.options.chosen(CoreMLOptions).per_channel)


class Compression:
    """Stores the weights of programs as the table of their model says.

    ``table``: of the model whose programs come next. ``notes``: deviations, each once.
    """

    def __init__(self, table: Iterable[Stored] = ()) -> None:
        self.table = table
        self.notes: list[str] = []
        # What weights became, by scheme and contents: functions and apps that share a weight
        # compress and hold it once.
        self._known: dict[Hashable, Any] = {}

    def apply(self, traced: ExportedProgram, program: Any) -> None:
        """Compress the weights of a function's program that coremltools made of a ``traced`` one.

        Raises SSDeviceError if coremltools cannot.
        """
        weights = self._names(traced)
        (function,) = program.functions.values()
        with function:
            for constant in function.find_ops(op_type=CONST):
                value = constant.outputs[0]
                if isinstance(value.val, np.ndarray) and value.val.size >= SMALLEST:
                    self._store(function, constant, weights.get(value.name.removesuffix(HALF)))

    def _names(self, traced: ExportedProgram) -> dict[str, Stored]:
        """The weights of the table by the names of the constants that coremltools makes of them."""
        # By name, since ExecuTorch gives its delegates copies of parameters.
        known = {f"{MODEL}{name}": one for one in self.table for name in one.names}
        found = {}
        for spec in traced.graph_signature.input_specs:
            if spec.target in known:
                found[spec.arg.name] = known[spec.target]
        return found

    def _store(self, function: Any, constant: Any, weight: Stored | None) -> None:
        """Replace a constant by its compressed form; None: it is no weight."""
        from coremltools.converters.mil import Builder as mb

        before = constant.outputs[0]
        scheme = weight.scheme if weight is not None else FLOAT16
        if weight is not None and weight.uneven:
            self._note(
                f"{key_of(weight.names[0])} has {weight.weight.shape[1]} inputs, not a multiple of "
                f"{BLOCK}: {scheme.name}, not int4"
            )
        digest = sha256(np.ascontiguousarray(before.val).data).digest()
        key = (scheme, str(before.dtype), before.shape, digest)
        if scheme.floats:
            values = self._known.setdefault(key, before.val)
            for var in (before, constant.val):
                var._sym_val.val = values
            return
        if key not in self._known:
            self._known[key] = _compressed(before.val, scheme)
        made = self._known[key]
        if made is None:
            raise SSDeviceError(f"weight {before.name} cannot be stored as {scheme.name}")
        if scheme is PALETTE4:
            name = f"{constant.name}_palettized"
            after = mb.constexpr_lut_to_dense(
                indices=made.indices, lut=made.lut, before_op=constant, name=name
            )
        else:
            name = f"{constant.name}_quantized"
            after = mb.constexpr_blockwise_shift_scale(
                data=made.data, scale=made.scale, before_op=constant, name=name
            )
        function.replace_uses_of_var_after_op(
            anchor_op=constant, old_var=before, new_var=after, no_check_var_types=True
        )
        function.remove_ops([constant])

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _compressed(values: Any, scheme: Scheme) -> Any:
    """What coremltools makes of a matrix, in containers of its own; None: it cannot."""
    from coremltools.optimize.coreml._quantization_passes import (
        linear_quantize_weights,
        palettize_weights,
    )

    if scheme is PALETTE4:
        group = next(size for size in PALETTE_GROUPS if len(values) % size == 0)
        return palettize_weights.blockwise_compress(values, "KMEANS", 4, [group, 0])
    # 0: the axis
    bits = 8 if scheme is INT8 else 4
    blocks = [1, BLOCK if scheme is INT4_BLOCK else 0]
    return linear_quantize_weights.blockwise_compress(
        values, bits, "LINEAR_SYMMETRIC", True, blocks
    )
