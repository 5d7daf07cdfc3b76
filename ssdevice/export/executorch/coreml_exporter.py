"""ExecuTorch with Core ML delegates: one program whose functions share the weights of one package.

ExecuTorch's partitioner takes everything except the writes of the cache, and its Core ML backend
joins the functions in one package that holds the weights once. ExecuTorch owns the cache, because a
state in Core ML would belong to a single method. The conversion is that of the ``coreml`` target:
its rewrites, its fixed passes, its weight schemes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import executorch  # noqa: F401  so that a missing package is noticed before a model is loaded
import numpy as np
import torch
from torch.export import ExportedProgram

from ssdevice.contract import CacheForm, FunctionSpec
from ssdevice.export.driver import EngineDriver
from ssdevice.export.executorch.exporter import PROGRAM_FILE, TOOLS
from ssdevice.export.executorch.lowering import constants_of, lower, traced
from ssdevice.export.executorch.target import GIVES_LOGITS, ExecutorchOptions
from ssdevice.export.exporter import ExportJob, TargetResult
from ssdevice.export.forms import function_module
from ssdevice.export.mlprogram import ops as coreml_ops
from ssdevice.export.mlprogram.graph import simplify
from ssdevice.export.mlprogram.half import half_precision
from ssdevice.export.mlprogram.options import CoreMLOptions
from ssdevice.export.mlprogram.program import MAIN, ct, to_model, to_program
from ssdevice.export.mlprogram.program import quiet as quiet_conversion
from ssdevice.export.mlprogram.stored import adopt_weights
from ssdevice.export.mlprogram.weights import ONLY_WEIGHTS, Compression, MLProgramExporter
from ssdevice.export.parity.gate import HALF_JITTER, check
from ssdevice.export.parity.products import FLOAT32
from ssdevice.export.parity.traced import follow_traced
from ssdevice.export.plan import ExportPlan, Quant
from ssdevice.export.quiet import quiet
from ssdevice.export.state_form import InternalCacheForm, example_inputs
from ssdevice.export.weights import floats_note, stored, unlisted
from ssdevice.model.step import StreamModel
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.coreml_delegate import open_delegates
from ssdevice.runtime.executorch.engine import CACHE_DTYPE, PROGRAM, ExecutorchEngine

WRITE = "aten.index_put.default"


def trace(name: str, spec: FunctionSpec, model: StreamModel, plan: ExportPlan) -> ExportedProgram:
    """The exported program of one function, with one state tensor per layer and values that float16
    holds.
    """
    module = function_module(name, half_precision(model), plan.geometry, plan.schedule)
    logits = plan.options.chosen(ExecutorchOptions).logits
    # Every row is read, because Core ML's shapes are static.
    form = InternalCacheForm(name, module, plan.geometry, stacked=False, logits=logits).eval()
    with torch.no_grad():
        return torch.export.export(form, example_inputs(spec), strict=False)


@contextmanager
def partitioner(plan: ExportPlan, compression: Compression) -> Iterator[Any]:
    """The partitioner for Core ML.

    In this context its backend converts as the ``coreml`` target does, and ``compression`` stores
    the weights.
    """
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner
    from executorch.exir.dialects.edge._ops import EdgeOpOverload

    coreml_ops.register()
    chosen = plan.options.chosen(CoreMLOptions)
    units = ct.ComputeUnit[chosen.compute_units.value.upper()]
    oldest = ct.target[chosen.deployment_target.value]
    compile_specs = CoreMLBackend.generate_compile_specs(
        compute_unit=units, minimum_deployment_target=oldest
    )

    def convert(program: ExportedProgram, *_: Any, **__: Any) -> Any:
        for node in program.graph_module.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, EdgeOpOverload):
                node.target = node.target._op
        simplify(program, ())
        nodes = {node.name: node for node in program.graph.nodes}
        outputs = [
            nodes[str(name)].meta["val"].dtype for name in program.graph_signature.user_outputs
        ]
        # Otherwise floats would be float16 outputs, where ExecuTorch has planned memory for
        # float32.
        types = [
            ct.TensorType(dtype=np.float32 if dtype.is_floating_point else np.int32)
            for dtype in outputs
        ]
        made = to_program(program, types, chosen.deployment_target)
        compression.apply(program, made)
        return to_model({MAIN: made}, MAIN, chosen.deployment_target)

    converted = patch.object(CoreMLBackend, "_convert_to_mlmodel", staticmethod(convert))
    with quiet_conversion(), quiet("executorch.backends.apple"), converted:
        yield CoreMLPartitioner(
            skip_ops_for_coreml_delegation=[WRITE],
            compile_specs=compile_specs,
            take_over_mutable_buffer=False,
        )


class CoreMLDelegateExporter(MLProgramExporter):
    """All functions in one ``.pte``; see ``Exporter``."""

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        plan = job.plan
        specs = plan.functions(CacheForm.INTERNAL, CACHE_DTYPE)
        constants = constants_of(plan.geometry, plan.tokenizer.stop_ids)

        def report(number: int, what: str) -> None:
            job.report("write the graphs", number, len(specs) + 2, what)

        compression = Compression(stored(job.loaded.model, self.schemes(plan)))
        with partitioner(plan, compression) as parts:
            programs = traced(
                specs, lambda name, spec: trace(name, spec, job.loaded.model, plan), report
            )
            # Weights are rounded later, by the conversion, so everything is float32 here.
            followed = follow_traced(job, specs, programs, FLOAT32, partial(report, len(specs)))
            delegated = lower(programs, parts, constants, folder / PROGRAM_FILE, report)
        notes = [*compression.notes, *floats_note(unlisted(compression.table))]
        notes += [GIVES_LOGITS] if plan.options.chosen(ExecutorchOptions).logits else []
        notes += [ONLY_WEIGHTS] if plan.options.quant is not Quant.FP16 else []
        every = (*notes, *delegated)
        tools = (*TOOLS, "coremltools")
        return TargetResult(
            {PROGRAM: PROGRAM_FILE},
            CacheForm.INTERNAL,
            CACHE_DTYPE,
            every,
            tools,
            followed=followed,
        )

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare the written program, with its delegates in the interpreter, with the torch model
        on its weights.
        """
        plan = job.plan
        file = folder / PROGRAM_FILE
        with EngineDriver(
            ExecutorchEngine(file, plan.geometry, plan.function_names, EngineOptions())
        ) as driver:
            _, package = open_delegates(file)
            adopt_weights(job.loaded.model, package, plan.function_names, plan.options.quant)
            return check(job, driver, HALF_JITTER)
