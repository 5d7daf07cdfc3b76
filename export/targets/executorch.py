"""The ExecuTorch target: one program for phones, whose functions share weights on disk and the cache in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import executorch  # noqa: F401  where it is missing, that is known before a model is loaded

from ssdevice.config import Schedule
from ssdevice.contract import CacheForm
from ssdevice.export.executorch_driver import ExecutorchDriver
from ssdevice.export.executorch_graph import Delegation
from ssdevice.export.executorch_lowering import constants_of, lower
from ssdevice.export.executorch_quantization import quantized
from ssdevice.export.parity import Tolerance, check
from ssdevice.export.plan import ExportJob, ExportPlan, Quant, TargetFile, TargetResult
from ssdevice.manifest import SCHEMA_VERSION
from ssdevice.runtime.engines.executorch import CACHE_DTYPE, PROGRAM
from ssdevice.text import ChatTokenizer

PROGRAM_FILE = "model.pte"
TOOLS = ("torch", "transformers", "executorch", "torchao")
# Rows: of the range of a layer's keys or values. XNNPACK rounds a row's scale in another order than torchao's
# simulation, so a value on a rounding edge may take the next of 255 codes.
TOLERANCES = {
    Quant.FP32: Tolerance(rows=1e-4, tie=1e-3),
    Quant.INT8: Tolerance(rows=0.05, tie=0.5),
    Quant.INT4: Tolerance(rows=0.05, tie=0.5),
}
SHOWN = 6


class ExecutorchExporter:
    """``step``, ``prefill`` and ``step_plain`` in one ``.pte``; see ``plan.Exporter``."""

    quants = (Quant.FP32, Quant.INT8, Quant.INT4)
    schedule = Schedule.DEFERRED

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        """Write ``model.pte``; see ``plan.Exporter``."""
        plan = job.plan
        specs = plan.functions(CacheForm.STATE, CACHE_DTYPE)
        constants = constants_of(plan.geometry, stop_ids(plan), SCHEMA_VERSION)
        model = quantized(job.loaded.model, plan.options.quant)
        stages = len(specs) + 2

        def report(number: int, what: str) -> None:
            job.report("write the graphs", number, stages, what)

        lowered = lower(model.model, plan, specs, constants, report)
        (folder / PROGRAM_FILE).write_bytes(lowered.data)
        notes = [*model.notes, *(describe(name, found) for name, found in lowered.delegations.items())]
        return TargetResult(
            (TargetFile(PROGRAM, PROGRAM_FILE),), CacheForm.STATE, CACHE_DTYPE, tuple(notes), _versions()
        )

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """The program as the runtime runs it, against the torch model with the same quantized weights."""
        quant = job.plan.options.quant
        model = quantized(job.loaded.model, quant).model
        reference = replace(job, loaded=replace(job.loaded, model=model))
        file = folder / next(entry.path for entry in result.files if entry.role == PROGRAM)
        with ExecutorchDriver(file, job.plan.geometry, job.plan.function_names) as driver:
            return check(reference, driver, TOLERANCES[quant])


def describe(name: str, found: Delegation) -> str:
    """What a function delegates, as a sentence."""
    outside = ", ".join(f"{op} {count}" for op, count in found.outside.most_common(SHOWN))
    return (
        f"{name}: {found.inside.total()} operators in {found.delegates} delegates, "
        f"{found.outside.total()} outside (most: {outside})"
    )


def stop_ids(plan: ExportPlan) -> tuple[int, ...]:
    """Tokens that end an answer, as the model's tokenizer says."""
    return ChatTokenizer.open(plan.folder).stop_ids


def _versions() -> dict[str, str]:
    found = {}
    for name in TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


EXPORTER = ExecutorchExporter()
