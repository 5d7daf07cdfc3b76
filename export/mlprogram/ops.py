"""The write into the cache state as one operator of both worlds: a torch operator and what it becomes in Core ML."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST_HALF, INFINITE = 65504.0, 1e38
"""The largest float16; from where on a value only stands for infinity, as coremltools has it."""
PIECE = 1 << 22
"""Elements looked at together."""
STATE_PASS = "common::canonicalize_inplace_pattern"
INTEGER_PASS = "common::add_int16_cast"
LARGEST_INT16 = 32767


@torch.library.custom_op("ssdevice::write_rows", mutates_args=())
def write_rows(state: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """``state [layers, kv_heads, capacity, hd]`` with ``rows [layers, kv_heads, n, hd]`` at positions ``at [1]`` on.

    Its own operator because an offset that is only known at run time is either traced into the graph as a constant or
    becomes a symbolic integer; as a tensor it stays what it is.
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
    """A ``state_form.Write`` without an offset: every position chooses between its old row and a new one.

    It costs a pass over the whole state, and no compiler has to know where the rows go.
    """
    new = rows.shape[2]
    position = torch.arange(state.shape[2], dtype=torch.int32)
    targets = length + torch.arange(new, dtype=torch.int32)
    hit = position[:, None] == targets[None]
    # One term of each sum is not zero: the product moves values, exactly in any precision.
    moved = torch.matmul(torch.where(hit, 1.0, 0.0).to(rows.dtype), rows)
    written = (position >= length) & (position < length + new)
    state.copy_(torch.where(written[None, None, :, None], moved, state))


def register() -> None:
    """Teach coremltools the operators that it lacks, and mend two of its passes; once a process is enough."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import register_torch_op
    from coremltools.converters.mil.mil.passes.defs.optimize_state import canonicalize_inplace_pattern
    from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision, add_int16_cast
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    register_torch_op(_func=_alias, torch_alias=["alias"], override=True)
    register_torch_op(_func=_write_rows, torch_alias=["ssdevice::write_rows"], override=True)

    class BackToFront(canonicalize_inplace_pattern):  # type: ignore[misc]
        """Moves each write of a state behind the operation that computes it.

        coremltools 9 goes from front to back and looks for the operation after the last one, which it has just
        removed where a program ends with the writes of two states.
        """

        def _apply_block(self, block: Any) -> None:
            from coremltools.converters.mil.mil.passes.helper import block_context_manager

            @block_context_manager  # type: ignore[untyped-decorator]
            def apply(itself: Any, block: Any) -> None:
                operations = list(block.operations)
                for operation in reversed(operations):
                    if operation.enclosing_block is not None:
                        itself._try_match_and_transform_pattern(operation, block, operations)

            apply(self, block)

    class ExactIntegers(add_int16_cast):  # type: ignore[misc]
        """Leaves tokens and positions as they are: coremltools 9 takes any integer that is gathered for a 16-bit one.

        Where a vocabulary is larger than that, another token would come out, without a word.
        """

        def should_cast_parameter(self, op: Any, param_name: str) -> bool:
            if param_name == "x" and op.inputs["x"].val is None:
                return False
            if op.op_type == "topk" and op.x.shape[op.axis.val] > LARGEST_INT16:
                return False
            return bool(super().should_cast_parameter(op, param_name))

    PASS_REGISTRY.passes[STATE_PASS] = BackToFront()
    PASS_REGISTRY.passes[INTEGER_PASS] = ExactIntegers()
    FP16ComputePrecision.fp16_overflow = staticmethod(_half_overflows)


def _half_overflows(operation: Any) -> bool:
    """Whether a constant that an operation reads has finite values that float16 does not hold.

    What coremltools 9 asks of each operation, without its list of indices, which takes six times the weight's bytes.
    """
    for argument in operation.inputs.values():
        for var in argument if isinstance(argument, (list, tuple)) else (argument,):
            constant = var.op is not None and var.op.op_type == "const"
            if constant and var.is_tensor_or_scalar_of(dtype="fp32"):
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
    if rows.dtype != state.dtype:  # the frontend reads states as float32; its half-precision pass comes later
        rows = mb.cast(x=rows, dtype=types.builtin_to_string(state.dtype))
    none = np.zeros(1, np.int32)
    begin = mb.concat(values=[none, none, at, none], axis=0)
    after = mb.add(x=at, y=np.array([rows.shape[2]], np.int32))
    end = mb.concat(values=[np.array([layers, heads], np.int32), after, np.array([dim], np.int32)], axis=0)
    context.add(mb.slice_update(x=state, update=rows, begin=begin, end=end, name=node.name))
