"""Core ML: one multifunction package whose functions share weights and a float16 state."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssdevice.config import Schedule
from ssdevice.contract import KEYS, PREFILL, STEP, VALUES, CacheForm, Geometry, functions
from ssdevice.export.coreml.apps import adapter_bytes, compact, growth
from ssdevice.export.coreml.golden import cases, write_golden
from ssdevice.export.coreml.shown import CoreMLShown
from ssdevice.export.driver import EngineDriver
from ssdevice.export.exporter import (
    ExportJob,
    TargetResult,
    app_results,
    check_functions,
    function_names,
    jobs,
)
from ssdevice.export.forms import function_module
from ssdevice.export.mlprogram import ops as coreml_ops
from ssdevice.export.mlprogram.graph import functional, name_inputs, simplify
from ssdevice.export.mlprogram.half import half_precision
from ssdevice.export.mlprogram.options import ComputeUnits, CoreMLOptions, Deployment, KVWrite
from ssdevice.export.mlprogram.program import ct, quiet, to_model, to_program
from ssdevice.export.mlprogram.stored import Sketches, adopt_weights, drop_matrices
from ssdevice.export.mlprogram.weights import ONLY_WEIGHTS, Compression, MLProgramExporter
from ssdevice.export.parity.gate import HALF_JITTER, check, check_each
from ssdevice.export.parity.products import FLOAT16
from ssdevice.export.plan import AppPlan, ExportPlan, Quant
from ssdevice.export.state_form import InternalCacheForm, Write, example_inputs
from ssdevice.export.weights import floats_note, stored, unlisted
from ssdevice.memory import free_memory
from ssdevice.mil.audit import audit
from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package
from ssdevice.model.step import StreamModel
from ssdevice.runtime.coreml.engine import MODEL, SETTINGS, CoreMLEngine

CACHE_DTYPE = "float16"
WRITES: dict[KVWrite, Write] = {
    KVWrite.SLICE: coreml_ops.write_slice,
    KVWrite.MASK: coreml_ops.write_masked,
}


def convert(
    name: str,
    model: StreamModel,
    geometry: Geometry,
    schedule: Schedule,
    chosen: CoreMLOptions,
    compression: Compression | None = None,
) -> Any:
    """One of the contract's functions as a coremltools program in float16, with the contract's
    tensor names.

    ``compression``: stores its weights in fewer bits.
    """
    coreml_ops.register()
    spec = functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)[name]
    inputs = example_inputs(spec)
    with quiet(), torch.no_grad():
        module = function_module(name, half_precision(model), geometry, schedule)
        form = InternalCacheForm(
            name, module, geometry, dtype=torch.float16, write=WRITES[chosen.kv_write]
        )
        program = functional(torch.export.export(form, inputs))
        name_inputs(program, [tensor.name for tensor in spec.inputs])
        simplify(program, (KEYS, VALUES))
        # Without streams prefill has no drafts, and Core ML has no empty tensors.
        outputs = spec.outputs if model.gamma or name != PREFILL else spec.outputs[:1]
        types = [
            ct.TensorType(name=tensor.name, dtype=getattr(np, tensor.dtype)) for tensor in outputs
        ]
        made = to_program(program, types, chosen.deployment_target)
        if compression is not None:
            compression.apply(program, made)
        return made


def save(
    programs: Mapping[str, Any], out: Path, default: str, deployment: Deployment = Deployment.IOS18
) -> None:
    """Write programs of one function each as the functions of a package; equal weights are stored
    once.
    """
    with quiet():
        to_model(programs, default, deployment).save(str(out))


PACKAGE = "model.mlpackage"
SETTINGS_FILE = "coreml.json"
GOLDEN = "golden.json"
TOOLS = ("torch", "transformers", "coremltools")


class CoreMLExporter(MLProgramExporter):
    """Writes the package, its settings for hosts, and golden integers to check a host with.

    Several apps become functions of one package, which holds the base's weights once. ``sketches``:
    by app, what the gate compares the package's matrices with, since the export releases the
    model's own.
    """

    several_apps = True

    def check(self, plan: ExportPlan) -> None:
        check_functions(plan)

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        plan = job.plan
        package = folder / PACKAGE
        chosen = plan.options.chosen(CoreMLOptions)
        table = function_names(plan)
        total = len({name for names in table.values() for name in names.values()})
        programs = dict[str, Any]()
        compression = Compression()
        sizes = dict[str, int]()
        kept = dict[str, int]()
        self.sketches: dict[str, Sketches] = {}
        for app, one in jobs(job):
            model = one.loaded.model
            compression.table = stored(model, self.schemes(plan))
            kept |= unlisted(compression.table)
            sizes[app.name] = adapter_bytes(model)
            for function, name in table[app.name].items():
                if name not in programs:
                    job.report("write the graphs", len(programs), total + 1, name)
                    programs[name] = convert(
                        function, model, plan.geometry, plan.schedule, chosen, compression
                    )
                    free_memory()
            # Saving needs the memory, and the gate will take the package's values.
            self.sketches[app.name] = drop_matrices(model)
            compression.table = ()
            free_memory()
        job.report("write the graphs", total, total + 1, "save")
        names = table[plan.apps[0].name]
        save(programs, package, names.get(STEP, names[PREFILL]), chosen.deployment_target)
        notes = [*compression.notes, *floats_note(kept)]
        del programs, compression
        free_memory()
        if not plan.merged:
            program = compact(package)
            added = growth(Package.open(package), table, program, sizes)
            notes += [added[app.name] for app in plan.apps if app.folder]
        settings = {
            name: getattr(chosen, name)
            for name in ("deployment_target", "compute_units", "kv_write")
        }
        (folder / SETTINGS_FILE).write_text(
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
        if plan.options.quant is not Quant.FP16:
            notes.append(ONLY_WEIGHTS)
        notes += _device_notes(package, chosen.compute_units)
        files = {MODEL: PACKAGE, SETTINGS: SETTINGS_FILE, "golden": GOLDEN}
        return TargetResult(
            files, CacheForm.INTERNAL, CACHE_DTYPE, tuple(notes), TOOLS, app_results(plan, table)
        )

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare the saved package, in the interpreter with float16, and write its golden
        integers.

        Afterwards the job's models have the package's weights, so that nothing holds weights twice.
        """
        table = function_names(job.plan)
        program = Program(Package.open(folder / PACKAGE))
        golden: list[dict[str, Any]] = []

        def check_app(app: AppPlan, one: ExportJob) -> Mapping[str, float]:
            names = table[app.name]
            quant = job.plan.options.quant
            adopt_weights(
                one.loaded.model, program, tuple(names.values()), quant, self.sketches[app.name]
            )
            engine = CoreMLEngine(program, job.plan.geometry, names)
            shown = CoreMLShown(program, job.plan.geometry, names)
            found = check(one, EngineDriver(engine), HALF_JITTER, shown, FLOAT16)
            golden.extend(cases(one, EngineDriver(engine)))
            return found

        facts = check_each(job, check_app)
        write_golden(job.plan, golden, folder / GOLDEN)
        return facts


def _device_notes(package: Path, units: ComputeUnits) -> list[str]:
    """Known problems of such a package on the Neural Engine, one sentence per kind."""
    if units not in (ComputeUnits.ALL, ComputeUnits.CPU_AND_NE):
        return []
    found = audit(Package.open(package))["warnings"]
    return [
        f"{warning['functions'][0]}, {warning['first']} ({warning['source']})" for warning in found
    ]
