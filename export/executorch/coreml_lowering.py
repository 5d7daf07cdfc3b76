"""Turns the modules of the step into one ExecuTorch program whose functions are Core ML delegates.

ExecuTorch's partitioner takes everything except the writes of the cache, and its Core ML backend joins the functions in
one package that holds the weights once. ExecuTorch owns the cache, because a state in Core ML would belong to a single
method. The conversion is that of the ``coreml`` target: its rewrites, its fixed passes, its weight schemes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.export import ExportedProgram

from ssdevice.contract import FunctionSpec
from ssdevice.export.executorch.options import ExecutorchOptions
from ssdevice.export.forms import function_module
from ssdevice.export.mlprogram import ops as coreml_ops
from ssdevice.export.mlprogram.graph import simplify
from ssdevice.export.mlprogram.half import half_precision
from ssdevice.export.mlprogram.options import CoreMLOptions
from ssdevice.export.mlprogram.program import MAIN, to_model, to_program
from ssdevice.export.mlprogram.quiet import ct
from ssdevice.export.mlprogram.quiet import quiet as quiet_conversion
from ssdevice.export.mlprogram.weights import Compressed, compress_for
from ssdevice.export.plan import ExportPlan
from ssdevice.export.quiet import quiet
from ssdevice.export.state_form import InternalCacheForm, example_inputs
from ssdevice.model.step import StreamModel

WRITE = "aten.index_put.default"


def trace(name: str, spec: FunctionSpec, model: StreamModel, plan: ExportPlan) -> ExportedProgram:
    """The exported program of one function, with one state tensor per layer and values that float16 holds."""
    module = function_module(name, half_precision(model), plan.geometry, plan.schedule)
    logits = plan.options.chosen(ExecutorchOptions).logits
    # Every row is read, because Core ML's shapes are static.
    form = InternalCacheForm(name, module, plan.geometry, stacked=False, logits=logits).eval()
    with torch.no_grad():
        return torch.export.export(form, example_inputs(spec), strict=False)


@contextmanager
def partitioner(plan: ExportPlan, notes: list[str]) -> Iterator[Any]:
    """The partitioner for Core ML. In this context its backend converts as the ``coreml`` target does.

    ``notes`` receives deviations from the requested precision.
    """
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    coreml_ops.register()
    chosen = plan.options.chosen(CoreMLOptions)
    known: Compressed = {}
    compile_specs = CoreMLBackend.generate_compile_specs(
        compute_unit=ct.ComputeUnit[chosen.compute_units.value.upper()],
        minimum_deployment_target=ct.target[chosen.deployment_target.value],
    )

    def convert(program: ExportedProgram, *_: Any, **__: Any) -> Any:
        made, found = _converted(program, plan, known)
        notes.extend(note for note in found if note not in notes)
        return made

    converted = patch.object(CoreMLBackend, "_convert_to_mlmodel", staticmethod(convert))
    with quiet_conversion(), quiet("executorch.backends.apple"), converted:
        yield CoreMLPartitioner(
            skip_ops_for_coreml_delegation=[WRITE], compile_specs=compile_specs, take_over_mutable_buffer=False
        )


def _converted(program: ExportedProgram, plan: ExportPlan, known: Compressed) -> tuple[Any, tuple[str, ...]]:
    """A function's delegate as an MLModel with compressed weights, and notes on deviations."""
    from executorch.exir.dialects.edge._ops import EdgeOpOverload

    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, EdgeOpOverload):
            node.target = node.target._op
    simplify(program, ())
    deployment = plan.options.chosen(CoreMLOptions).deployment_target
    nodes = {node.name: node for node in program.graph.nodes}
    outputs = [nodes[str(name)].meta["val"].dtype for name in program.graph_signature.user_outputs]
    # Otherwise floats would be float16 outputs, where ExecuTorch has planned memory for float32.
    types = [ct.TensorType(dtype=np.float32 if dtype.is_floating_point else np.int32) for dtype in outputs]
    made = to_program(program, types, deployment)
    notes = compress_for(plan, made, known)
    return to_model({MAIN: made}, MAIN, deployment), notes
