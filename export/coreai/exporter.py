"""The Core AI target: one asset whose functions share weights and take the cache as state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram
from torch.nn.utils import parametrize

from ssdevice.config import Schedule
from ssdevice.contract import CacheForm
from ssdevice.export.app_functions import app_results, function_names, jobs
from ssdevice.export.calibration.grid import Grid
from ssdevice.export.coreai.conversion import Asset, trace
from ssdevice.export.coreai.weights import GROUP, INT4_GRID, stored
from ssdevice.export.driver import EngineDriver
from ssdevice.export.exporter import Exporter, ExportJob, TargetFile, TargetResult
from ssdevice.export.parity.gate import FLOAT_JITTER, check, check_each
from ssdevice.export.parity.products import FLOAT32
from ssdevice.export.parity.traced import follow_traced
from ssdevice.export.plan import AppPlan, ExportPlan, Quant
from ssdevice.runtime.coreai.engine import CACHE_DTYPE, MODEL, CoreAIEngine

ASSET = "model.aimodel"
TOOLS = ("torch", "transformers", "coreai-torch", "coreai-core")
LARGE_CACHE = 2048
"""Rows of a cache from which phones are reported to fail."""


class CoreAIExporter(Exporter):
    """Writes one ``.aimodel``. Several apps become functions of it, over the base's weights; see ``Exporter``."""

    bits = {Quant.FP32: 32.0, Quant.FP16: 16.0, Quant.INT8: 8.1, Quant.INT4: 5.2}  # noqa: RUF012
    schedule = Schedule.FUSED
    several_apps = True
    chooses = True
    calibrates = frozenset({Quant.INT4})

    def grid(self, plan: ExportPlan, linear: nn.Linear, factor: bool) -> Grid | None:
        return None if factor or linear.in_features % GROUP else INT4_GRID

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        """Write the asset; see ``Exporter``."""
        plan, table, asset = job.plan, function_names(job.plan), Asset()
        total = len({name for names in table.values() for name in names.values()})
        programs: dict[str, ExportedProgram] = {}
        notes, followed = [*job.notes], dict[str, float]()

        def report(what: str) -> None:
            job.report("write the graphs", len(programs), total + 1, what)

        for app, one in jobs(job):
            specs, model = one.plan.functions(CacheForm.INTERNAL, CACHE_DTYPE), one.loaded.model
            with stored(model, plan.options.quant) as found:
                new = {name: specs[function] for function, name in table[app.name].items() if name not in programs}
                for name, spec in new.items():
                    report(name)
                    programs[name] = trace(spec, model, one.plan)
                own = {function: programs[name] for function, name in table[app.name].items()}
                with parametrize.cached():  # weights are not computed in every call
                    followed = _largest(followed, follow_traced(one, specs, own, FLOAT32, report))
                for name, spec in new.items():
                    asset.add(name, spec, programs[name])
            notes += [note for note in found if note not in notes]
        report("convert")
        asset.save(folder / ASSET)
        notes += _notes(plan)
        apps = app_results(plan, table)
        files = (TargetFile(MODEL, ASSET),)
        return TargetResult(files, CacheForm.INTERNAL, CACHE_DTYPE, tuple(notes), TOOLS, apps, followed)

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare the asset, in Apple's runtime, with torch models of the stored weights; see ``Exporter``."""
        table = function_names(job.plan)

        def check_app(app: AppPlan, one: ExportJob) -> Mapping[str, float]:
            engine = CoreAIEngine(folder / ASSET, job.plan.geometry, table[app.name])
            with EngineDriver(engine) as driver, stored(one.loaded.model, job.plan.options.quant, values=True):
                return check(one, driver, FLOAT_JITTER)

        return check_each(job, check_app)


def _largest(facts: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Both, with the larger value of what both have."""
    return {**facts, **{key: max(value, facts.get(key, value)) for key, value in more.items()}}


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
