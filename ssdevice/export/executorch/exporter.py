"""The ExecuTorch target: one program for phones, whose functions share weights on disk and the
cache in memory.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import executorch  # noqa: F401  so that a missing package is noticed before a model is loaded
import numpy as np
from numpy.typing import NDArray

from ssdevice.adapters.slots import LAYOUT_FILE, LAYOUT_ROLE
from ssdevice.adapters.storage import write_tensors
from ssdevice.adapters.weights import AdapterWeights, fill
from ssdevice.bundle.manifest import App
from ssdevice.config import Schedule
from ssdevice.contract import CacheForm
from ssdevice.export.driver import EngineDriver
from ssdevice.export.executorch.lowering import constants_of, lower, partitioner, trace, traced
from ssdevice.export.executorch.quantization import (
    held_values,
    map_codes,
    quantized,
    release,
    schemes,
)
from ssdevice.export.executorch.slots import check_apps, filled, set_adapter, slot_model, slots_of
from ssdevice.export.executorch.speed import quick
from ssdevice.export.executorch.stored import check_stored
from ssdevice.export.executorch.target import GIVES_LOGITS, ExecutorchOptions
from ssdevice.export.exporter import Exporter, ExportJob, TargetResult
from ssdevice.export.parity.gate import FLOAT_JITTER, QUANTIZED_JITTER, check, check_each
from ssdevice.export.parity.products import FLOAT32, QUANTIZED
from ssdevice.export.parity.traced import Recorder, follow_traced
from ssdevice.export.plan import AppPlan, ExportPlan, Quant
from ssdevice.export.variants import check_slots, write_slots
from ssdevice.export.weights import Schemes
from ssdevice.memory import free_memory
from ssdevice.model.step import StreamModel
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import ADAPTER_FILE, CACHE_DTYPE, PROGRAM, ExecutorchEngine
from ssdevice.runtime.executorch.program import AdapterSlots

PROGRAM_FILE = "model.pte"
TOOLS = ("torch", "transformers", "executorch", "torchao")


class ExecutorchExporter(Exporter):
    """All functions in one ``.pte``.

    ``reference``: a merged job's model with the written program's weights.
    """

    reference: StreamModel | None = None
    bits = {Quant.FP32: 32.0, Quant.INT8: 8.1, Quant.INT4: 5.0}  # noqa: RUF012
    schedule = Schedule.DEFERRED
    several_apps = True
    chooses = True
    calibrates = frozenset({Quant.INT4})
    smooths = frozenset({Quant.INT8})

    def schemes(self, plan: ExportPlan) -> Schemes:
        return schemes(plan.options.quant)

    def check(self, plan: ExportPlan) -> None:
        if not plan.merged:
            check_apps(plan)
            check_slots(plan)

    def prepare(self, job: ExportJob) -> ExportJob:
        # Unfolded, each linear would have two more float32 products for its stream adapter.
        return job.folded()

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        """Write ``model.pte``, and a file for each separate app; see ``Exporter``."""
        plan = job.plan
        specs = plan.functions(CacheForm.INTERNAL, CACHE_DTYPE)
        constants = constants_of(plan.geometry, plan.tokenizer.stop_ids)
        files = {PROGRAM: PROGRAM_FILE}
        apps: dict[str, App] = {}
        shown: Mapping[str, NDArray[np.float32]] = {}
        source = job.loaded.model
        if not plan.merged:
            weights = {
                app.name: AdapterWeights.read(app.folder)
                for app in plan.apps
                if app.folder is not None
            }
            source, layout = slot_model(job, list(weights.values()))
            apps = write_slots(plan, layout, folder, (ADAPTER_FILE, write_tensors))
            files[LAYOUT_ROLE] = LAYOUT_FILE
            if (adapter := weights.get(check_apps(plan).name)) is not None:
                shown = fill(adapter, layout.variants[0], plan.geometry.gamma, layout.hidden)

        def report(number: int, what: str) -> None:
            job.report("write the graphs", number, len(specs) + 2, what)

        model, rounded = quantized(source, plan.options.quant)
        file = folder / PROGRAM_FILE
        if plan.merged:
            release(source, model)
            map_codes(model, folder)
            self.reference = model
        bounds = FLOAT32 if plan.options.quant is Quant.FP32 else QUANTIZED
        reference = replace(job, loaded=replace(job.loaded, model=model))
        with quick():
            programs = traced(specs, lambda name, spec: trace(name, spec, model, plan), report)
            # Apps differ only in what their slots hold, so one of them shows what is computed.
            with held_values(model, folder), filled(model, shown):
                followed = follow_traced(
                    reference, specs, programs, bounds, partial(report, len(specs))
                )
            products = {name: Recorder(made).weights for name, made in programs.items()}
            programs |= set_adapter(model)
            delegated = lower(
                programs, partitioner(), constants, file, report, dict(slots_of(model))
            )
        del programs
        free_memory()
        with held_values(model, folder):
            check_stored(file, model, products)
        logits = (GIVES_LOGITS,) if plan.options.chosen(ExecutorchOptions).logits else ()
        notes = (*rounded, *job.notes, *logits, *delegated)
        return TargetResult(files, CacheForm.INTERNAL, CACHE_DTYPE, notes, TOOLS, apps, followed)

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare the program in the runtime with torch models of the same quantized weights, app
        by app.
        """
        plan = job.plan
        file = folder / PROGRAM_FILE
        quant = plan.options.quant
        options = EngineOptions()

        def check_app(app: AppPlan, one: ExportJob) -> Mapping[str, float]:
            kept = result.apps.get(app.name)
            slots = AdapterSlots(folder / kept.files[0]) if kept and kept.files else None
            model = self.reference or quantized(one.loaded.model, quant)[0]
            reference = replace(one, loaded=replace(one.loaded, model=model))
            names = tuple(kept.functions) if kept else plan.function_names
            engine = ExecutorchEngine(file, plan.geometry, names, options, adapter=slots)
            with held_values(model, folder), EngineDriver(engine) as driver:
                return check(
                    reference, driver, FLOAT_JITTER if quant is Quant.FP32 else QUANTIZED_JITTER
                )

        return check_each(job, check_app)
