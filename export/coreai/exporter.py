"""The Core AI target: one asset whose functions share weights and take the cache as state."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from torch import nn

from ssdevice.config import Schedule
from ssdevice.contract import CacheForm
from ssdevice.export.calibration.grid import Grid
from ssdevice.export.coreai.conversion import save_asset
from ssdevice.export.coreai.weights import GROUP, INT4_GRID, stored
from ssdevice.export.driver import EngineDriver
from ssdevice.export.parity.gate import FLOAT_JITTER, check
from ssdevice.export.plan import Exporter, ExportJob, ExportPlan, Quant, TargetFile, TargetResult
from ssdevice.runtime.coreai.engine import CACHE_DTYPE, MODEL, CoreAIEngine

ASSET = "model.aimodel"
TOOLS = ("torch", "transformers", "coreai-torch", "coreai-core")
LARGE_CACHE = 2048
"""Rows of a cache from which phones are reported to fail."""


class CoreAIExporter(Exporter):
    """``step``, ``prefill`` and ``step_plain`` in one ``.aimodel``; see ``plan.Exporter``."""

    bits = {Quant.FP32: 32.0, Quant.FP16: 16.0, Quant.INT8: 8.1, Quant.INT4: 5.2}  # noqa: RUF012
    schedule = Schedule.FUSED
    calibrates = frozenset({Quant.INT4})

    def grid(self, plan: ExportPlan, linear: nn.Linear, factor: bool) -> Grid | None:
        return None if factor or linear.in_features % GROUP else INT4_GRID

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        """Write the asset; afterwards the job's model has the values that it stores. See ``plan.Exporter``."""
        plan = job.plan
        stages = len(plan.function_names) + 1

        def report(number: int, what: str) -> None:
            job.report("write the graphs", number, stages, what)

        with stored(job.loaded.model, plan.options.quant) as notes:
            save_asset(job.loaded.model, plan, folder / ASSET, report)
        notes = (*job.notes, *notes, *_notes(plan))
        tools = {name: version(name) for name in TOOLS}
        return TargetResult((TargetFile(MODEL, ASSET),), CacheForm.INTERNAL, CACHE_DTYPE, notes, tools)

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare the asset, as Apple's runtime runs it, with the torch model that ``export`` left; see ``plan.Exporter``."""
        engine = CoreAIEngine(folder / ASSET, job.plan.geometry, job.plan.function_names)
        with EngineDriver(engine) as driver:
            return check(job, driver, FLOAT_JITTER)


def _notes(plan: ExportPlan) -> list[str]:
    """What a user of this bundle should know."""
    notes = []
    if plan.options.quant is not Quant.FP32:
        notes.append("only weights are rounded: activations, products and the cache are float32")
    if plan.geometry.capacity >= LARGE_CACHE:
        notes.append(
            f"the cache has {plan.geometry.capacity} rows; from {LARGE_CACHE} on phones are reported to fail: "
            "choose a smaller --context for them"
        )
    return notes
