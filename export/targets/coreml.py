"""Core ML: one multifunction package whose functions share weights and a float16 state."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ssdevice.config import Schedule
from ssdevice.contract import PREFILL, STEP, CacheForm
from ssdevice.export.coreml_convert import CACHE_DTYPE, convert, merge, quiet
from ssdevice.export.coreml_driver import CoreMLDriver
from ssdevice.export.coreml_golden import instruction_of, prompt_frame, write_golden
from ssdevice.export.coreml_options import ComputeUnits
from ssdevice.export.coreml_stored import stored_weights
from ssdevice.export.coreml_weights import compress, matrices, plan_weights
from ssdevice.export.parity import Tolerance, check
from ssdevice.export.plan import ExportJob, Quant, TargetFile, TargetResult
from ssdevice.mil.audit import audit
from ssdevice.mil.reader import Package
from ssdevice.text import ChatTokenizer

PACKAGE = "model.mlpackage"
SETTINGS = "coreml.json"
GOLDEN = "golden.json"
DEPLOYMENT = "iOS18"
TOOLS = ("torch", "transformers", "coremltools")
TOLERANCE = Tolerance(rows=0.02, tie=0.15)
"""Ceilings for float16 against the float32 model with the package's weights."""


@dataclass(frozen=True)
class CoreMLExporter:
    """Writes the package, its settings for hosts, and golden integers to check a host with."""

    quants: tuple[Quant, ...] = (Quant.FP16, Quant.INT8, Quant.INT4, Quant.PALETTE4)
    schedule: Schedule = Schedule.FUSED

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        """See Exporter."""
        plan, options = job.plan, job.plan.options
        g, names = plan.geometry, plan.function_names
        notes: list[str] = []
        with tempfile.TemporaryDirectory(prefix="ssdevice-") as scratch:
            parts: dict[str, Path] = {}
            for number, name in enumerate(names):
                job.report("write the graphs", number, len(names) + 1, name)
                model = convert(name, job.loaded.model, g, plan.schedule, options.coreml.kv_write)
                weights = matrices(model.get_spec())
                schemes = plan_weights(weights, options.quant, options.coreml.per_channel, g.vocab)
                notes.extend(note for note in schemes.notes if note not in notes)
                with quiet():
                    model = compress(model, schemes, {weight.name: weight.shape for weight in weights})
                    parts[name] = Path(scratch) / f"{name}.mlpackage"
                    model.save(str(parts[name]))
            job.report("write the graphs", len(names), len(names) + 1, "merge")
            merge(parts, folder / PACKAGE, STEP if STEP in names else PREFILL)
        self._write_settings(job, folder / SETTINGS)
        if options.quant is not Quant.FP16:
            notes.append("weights alone are compressed: activations are float16")
        notes.extend(_device_notes(folder / PACKAGE, options.coreml.compute_units))
        files = [TargetFile("model", PACKAGE), TargetFile("settings", SETTINGS)]
        write_golden(job, folder / PACKAGE, folder / GOLDEN)
        files.append(TargetFile("golden", GOLDEN))
        tools = {name: version(name) for name in TOOLS}
        return TargetResult(tuple(files), CacheForm.STATE, CACHE_DTYPE, tuple(notes), tools)

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """See Exporter: the saved package in the interpreter, which rounds as float16 does."""
        driver = CoreMLDriver(folder / PACKAGE, job.plan.geometry)
        with stored_weights(job.loaded.model, folder / PACKAGE):
            return check(job, driver, TOLERANCE)

    def _write_settings(self, job: ExportJob, file: Path) -> None:
        chosen = job.plan.options.coreml
        before, after = prompt_frame(ChatTokenizer.open(job.plan.folder), instruction_of(job.plan))
        settings = {
            "deployment_target": DEPLOYMENT,
            "compute_units": chosen.compute_units.value,
            "kv_write": chosen.kv_write.value,
            "prompt": {"before": before, "after": after},
        }
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _device_notes(package: Path, units: ComputeUnits) -> list[str]:
    """What is known to go wrong with such a package where the Neural Engine may run it, one sentence a kind."""
    if units not in (ComputeUnits.ALL, ComputeUnits.CPU_AND_NE):
        return []
    first: dict[str, str] = {}
    for warning in audit(Package.open(package)).warnings:
        first.setdefault(warning.code, f"{warning.function}, {warning.subject}: {warning.message} ({warning.source})")
    return list(first.values())


EXPORTER = CoreMLExporter()
