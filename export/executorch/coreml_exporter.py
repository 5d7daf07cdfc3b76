"""ExecuTorch with Core ML delegates: one program whose functions share the weights of one package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import executorch  # noqa: F401  so that a missing package is noticed before a model is loaded
from torch import nn

from ssdevice.config import Schedule
from ssdevice.contract import CacheForm
from ssdevice.export.calibration.grid import Grid
from ssdevice.export.driver import EngineDriver
from ssdevice.export.executorch.coreml_lowering import partitioner, trace
from ssdevice.export.executorch.exporter import PROGRAM_FILE, TOOLS
from ssdevice.export.executorch.lowering import constants_of, lower, traced
from ssdevice.export.executorch.options import GIVES_LOGITS, ExecutorchOptions
from ssdevice.export.exporter import Exporter, ExportJob, TargetResult
from ssdevice.export.mlprogram.options import CoreMLOptions
from ssdevice.export.mlprogram.stored import adopt_weights
from ssdevice.export.mlprogram.weights import BITS, ONLY_WEIGHTS, int4_grid
from ssdevice.export.parity.gate import HALF_JITTER, check
from ssdevice.export.parity.products import FLOAT32
from ssdevice.export.parity.traced import follow_traced
from ssdevice.export.plan import ExportPlan, Quant
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.coreml_delegate import open_delegates
from ssdevice.runtime.executorch.engine import CACHE_DTYPE, PROGRAM, ExecutorchEngine


class CoreMLDelegateExporter(Exporter):
    """All functions in one ``.pte``; see ``Exporter``."""

    bits = BITS
    schedule = Schedule.FUSED
    chooses = True
    calibrates = frozenset({Quant.INT4})

    def grid(self, plan: ExportPlan, linear: nn.Linear, factor: bool) -> Grid | None:
        return None if factor else int4_grid(linear.weight.shape, plan.options.chosen(CoreMLOptions).per_channel)

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        """Write ``model.pte``; see ``Exporter``."""
        plan = job.plan
        specs = plan.functions(CacheForm.INTERNAL, CACHE_DTYPE)
        constants = constants_of(plan.geometry, plan.tokenizer.stop_ids)

        def report(number: int, what: str) -> None:
            job.report("write the graphs", number, len(specs) + 2, what)

        notes: list[str] = []
        with partitioner(plan, notes) as parts:
            programs = traced(specs, lambda name, spec: trace(name, spec, job.loaded.model, plan), report)
            # Weights are rounded later, by the conversion, so everything is float32 here.
            followed = follow_traced(job, specs, programs, FLOAT32, partial(report, len(specs)))
            delegated = lower(programs, parts, constants, folder / PROGRAM_FILE, report)
        notes += (
            *((GIVES_LOGITS,) if plan.options.chosen(ExecutorchOptions).logits else ()),
            *((ONLY_WEIGHTS,) if plan.options.quant is not Quant.FP16 else ()),
            *delegated,
        )
        form, tools = (CacheForm.INTERNAL, CACHE_DTYPE), (*TOOLS, "coremltools")
        return TargetResult({PROGRAM: PROGRAM_FILE}, *form, tuple(notes), tools, followed=followed)

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare the written program, with its delegates in the interpreter, with the torch model on its weights."""
        plan, file = job.plan, folder / PROGRAM_FILE
        with EngineDriver(ExecutorchEngine(file, plan.geometry, plan.function_names, EngineOptions())) as driver:
            _, package = open_delegates(file)
            adopt_weights(job.loaded.model, package, plan.function_names, quant=plan.options.quant)
            return check(job, driver, HALF_JITTER)
