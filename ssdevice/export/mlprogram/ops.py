"""The write into the cache state as one torch operator, its conversion to Core ML, and fixes of
coremltools' passes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST_HALF = 65504.0
INFINITE = 1e38
"""The largest float16; the smallest value that coremltools takes for infinity."""
PIECE = 1 << 22
"""Elements that are checked at once."""
STATE_PASS = "common::canonicalize_inplace_pattern"
INTEGER_PASS = "common::add_int16_cast"


@torch.library.custom_op("ssdevice::write_rows", mutates_args=())
def write_rows(state: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """``state [layers, kv_heads, capacity, hd]`` with ``rows [layers, kv_heads, n, hd]`` written
    from ``at [1]`` on.

    It is a custom operator because tracing turns an offset that is only known at run time into a
    constant or a symbolic integer; as a tensor argument it stays a tensor.
    """
    out = state.clone()
    start = int(at)
    out[:, :, start : start + rows.shape[2]] = rows
    return out


@write_rows.register_fake
def _(state: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    return torch.empty_like(state)


def write_slice(state: Tensor, rows: Tensor, length: Tensor) -> None:
    """A ``state_form.Write`` at an offset."""
    state.copy_(write_rows(state, rows, length))


def write_masked(state: Tensor, rows: Tensor, length: Tensor) -> None:
    """A ``state_form.Write`` without an offset: every position selects either its old row or a new
    one.

    It costs a pass over the whole state, but compilers need not handle a run-time offset.
    """
    new = rows.shape[2]
    position = torch.arange(state.shape[2], dtype=torch.int32)
    targets = length + torch.arange(new, dtype=torch.int32)
    hit = position[:, None] == targets[None]
    # Each sum has one term that is not zero, so the product moves values exactly in any precision.
    moved = torch.matmul(torch.where(hit, 1.0, 0.0).to(rows.dtype), rows)
    written = (position >= length) & (position < length + new)
    state.copy_(torch.where(written[None, None, :, None], moved, state))


def register() -> None:
    """Register the operators that coremltools lacks, and fix three of its passes.

    Once per process is enough.
    """
    from coremltools.converters.mil.frontend.torch.torch_op_registry import register_torch_op
    from coremltools.converters.mil.mil.passes.defs.optimize_state import (
        canonicalize_inplace_pattern,
    )
    from coremltools.converters.mil.mil.passes.defs.quantization import (
        FP16ComputePrecision,
        add_int16_cast,
    )
    from coremltools.converters.mil.mil.passes.helper import block_context_manager
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    register_torch_op(_func=_alias, torch_alias=["alias"], override=True)
    register_torch_op(_func=_write_rows, torch_alias=["ssdevice::write_rows"], override=True)

    class BackToFront(canonicalize_inplace_pattern):  # type: ignore[misc]
        """Moves each write of a state to just after the operation that computes it.

        coremltools 9 goes from front to back and looks for the operation after the last one. In a
        program that ends with the writes of two states it has just removed that operation.
        """

        @block_context_manager  # type: ignore[untyped-decorator]
        def _apply_block(self, block: Any) -> None:
            operations = list(block.operations)
            for operation in reversed(operations):
                if operation.enclosing_block is not None:
                    self._try_match_and_transform_pattern(operation, block, operations)

    class ExactIntegers(add_int16_cast):  # type: ignore[misc]
        """Leaves tokens and positions unchanged: coremltools 9 casts all integers that are gathered
        to 16 bits.

        With a vocabulary larger than that it would silently return another token.
        """

        def should_cast_parameter(self, op: Any, param_name: str) -> bool:
            if param_name == "x" and op.inputs["x"].val is None:
                return False
            return bool(super().should_cast_parameter(op, param_name))

    PASS_REGISTRY.passes[STATE_PASS] = BackToFront()
    PASS_REGISTRY.passes[INTEGER_PASS] = ExactIntegers()
    FP16ComputePrecision.fp16_overflow = staticmethod(_half_overflows)


def _half_overflows(operation: Any) -> bool:
    """Whether a constant that an operation reads has finite values that float16 does not hold.

    The same check as in coremltools 9, but without its list of indices, which takes six times the
    weight's memory.
    """
    for argument in operation.inputs.values():
        for var in argument if isinstance(argument, (list, tuple)) else (argument,):
            if (
                var.op is not None
                and var.op.op_type == "const"
                and var.is_tensor_or_scalar_of(dtype="fp32")
            ):
                values = np.asarray(var.op.val.val).reshape(-1)
                for at in range(0, values.size, PIECE):
                    sizes = np.abs(values[at : at + PIECE])
                    if np.any((sizes > LARGEST_HALF) & (sizes < INFINITE)):
                        return True
    return False


def _alias(context: Any, node: Any) -> None:
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs

    (x,) = _get_inputs(context, node, expected=1)
    context.add(mb.identity(x=x, name=node.name))


def _write_rows(context: Any, node: Any) -> None:
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs
    from coremltools.converters.mil.mil import types

    state, rows, at = _get_inputs(context, node, expected=3)
    layers, heads, _, dim = state.shape
    if (
        rows.dtype != state.dtype
    ):  # the frontend reads states as float32; its half-precision pass runs later
        rows = mb.cast(x=rows, dtype=types.builtin_to_string(state.dtype))
    none = np.zeros(1, np.int32)
    begin = mb.concat(values=[none, none, at, none], axis=0)
    after = mb.add(x=at, y=np.array([rows.shape[2]], np.int32))
    end = mb.concat(
        values=[np.array([layers, heads], np.int32), after, np.array([dim], np.int32)], axis=0
    )
    context.add(mb.slice_update(x=state, update=rows, begin=begin, end=end, name=node.name))
