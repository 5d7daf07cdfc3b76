"""The ONNX target: three graphs with the cache passed in as rows, one file of weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ssdevice.config import Schedule
from ssdevice.contract import PAST, PLAIN, PREFILL, STEP, CacheForm, FunctionSpec
from ssdevice.errors import UnsupportedModelError
from ssdevice.export.forms import RowsForm, exportable, function_module
from ssdevice.export.onnx_attention import permuted_heads
from ssdevice.export.onnx_driver import OnnxDriver
from ssdevice.export.onnx_file import WeightFile, save_graph
from ssdevice.export.onnx_graph import finish, simplify
from ssdevice.export.onnx_quantization import WeightStore, quantize
from ssdevice.export.onnx_reference import simulated
from ssdevice.export.parity import Tolerance, check
from ssdevice.export.plan import ExportJob, Quant, TargetFile, TargetResult
from ssdevice.export.targets.onnx_ops import TRANSLATIONS

OPSET = 23
WEIGHTS = "weights"
WEIGHTS_FILE = "weights.bin"
CACHE_DTYPE = "float32"
EXAMPLE_PAST = 7
TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
MERGED = "stream rows have weights of their own in the MSA layers: the stream adapters are folded into a copy"
FILES = {STEP: "step.onnx", PREFILL: "prefill.onnx", PLAIN: "step_plain.onnx"}
# Measured: 1e-6 in float32; quantized 1e-6 where nothing lies on a rounding edge, else up to 0.03 in single calls.
TOLERANCES = {
    Quant.FP32: Tolerance(rows=1e-4, typical=1e-5, tie=1e-3),
    Quant.INT8: Tolerance(rows=0.15, typical=0.05, tie=0.5),
    Quant.INT4: Tolerance(rows=0.15, typical=0.05, tie=0.5),
}


class OnnxExporter:
    """``step``, ``prefill`` and ``step_plain`` for ONNX Runtime on CPUs."""

    quants = (Quant.FP32, Quant.INT8, Quant.INT4)
    schedule = Schedule.DEFERRED
    several_apps = True

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        """Write the graphs and ``weights.bin``; see ``plan.Exporter``."""
        plan = job.plan
        specs = plan.functions(CacheForm.ROWS, CACHE_DTYPE)
        store = WeightStore()
        streams = job.loaded.model.streams
        merged = plan.schedule is Schedule.DEFERRED and streams is not None and streams.merge()
        with WeightFile(folder / WEIGHTS_FILE) as weights:
            for number, (name, spec) in enumerate(specs.items()):
                job.report("write the graphs", number, len(specs), name)
                model = trace(job, spec)
                edit = simplify(model, (permuted_heads,))
                quantize(edit, plan.options.quant, store)
                finish(edit)
                save_graph(model, spec, folder / FILES[name], weights)
        files = [TargetFile(name, FILES[name]) for name in specs]
        tools = {name: version(name) for name in TOOLS}
        return TargetResult(
            (*files, TargetFile(WEIGHTS, WEIGHTS_FILE)),
            CacheForm.ROWS,
            CACHE_DTYPE,
            (*_notes(plan.options.quant, store), *((MERGED,) if merged else ())),
            tools,
        )

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare with the torch reference under the same quantization; see ``plan.Exporter``."""
        quant = job.plan.options.quant
        files = {file.role: folder / file.path for file in result.files if file.role != WEIGHTS}
        driver = OnnxDriver(files, job.plan.geometry)
        with simulated(job.loaded.model, quant):
            return check(job, driver, TOLERANCES[quant])


def trace(job: ExportJob, spec: FunctionSpec) -> Any:
    """The ONNX model of one function as the exporter gives it, linears as placeholders; an ``onnx_ir`` model."""
    plan, model = job.plan, job.loaded.model
    module = function_module(spec.name, model, plan.geometry, plan.schedule)
    form = RowsForm(spec.name, module, plan.geometry.kv_heads).eval()
    past = torch.export.Dim(PAST, min=1, max=plan.geometry.capacity)
    arguments, dynamic = [], []
    for tensor in spec.inputs:
        shape = tuple(EXAMPLE_PAST if size == PAST else int(size) for size in tensor.shape)
        kind = torch.int32 if tensor.dtype == "int32" else torch.float32
        arguments.append(torch.ones(shape, dtype=kind))
        dynamic.append({0: past} if PAST in tensor.shape else None)
    try:
        with torch.no_grad(), quiet(), exportable(model):
            program = torch.export.export(form, tuple(arguments), dynamic_shapes=(tuple(dynamic),), strict=False)
            onnx_program = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=OPSET,
                input_names=[tensor.name for tensor in spec.inputs],
                output_names=[tensor.name for tensor in spec.outputs],
                custom_translation_table=TRANSLATIONS,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error).split("## Exception summary")[-1].strip().splitlines()
        raise UnsupportedModelError(
            f"{plan.identity.model_type}: the {spec.name} graph has no ONNX form ({reason[0] if reason else error})"
        ) from error
    assert onnx_program is not None
    return onnx_program.model


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's warnings, which concern packages this export does not use."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _notes(quant: Quant, store: WeightStore) -> tuple[str, ...]:
    notes = []
    if quant is Quant.INT4:
        notes.append("embedding and head are int8 per token: four bits cost most accuracy there")
    if store.kept:
        total = sum(store.kept.values())
        names = ", ".join(sorted(store.kept)[:3]) + (", .." if len(store.kept) > 3 else "")
        notes.append(f"{len(store.kept)} small weights ({total} elements) stay float32: {names}")
    return tuple(notes)


EXPORTER = OnnxExporter()
