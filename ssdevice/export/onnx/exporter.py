"""The ONNX target: three graphs with the cache passed in as rows, one file of weights."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ssdevice.adapters.slots import IDENTIFIERS, LAYOUT_FILE, LAYOUT_ROLE, Slot, SlotLayout, Variant
from ssdevice.bundle.manifest import App
from ssdevice.config import Schedule
from ssdevice.contract import CacheForm, FunctionSpec, TensorSpec
from ssdevice.errors import UnsupportedModelError
from ssdevice.export.driver import EngineDriver
from ssdevice.export.exporter import Exporter, ExportJob, TargetResult
from ssdevice.export.forms import ExternalCacheForm, exportable, function_module
from ssdevice.export.onnx import tracing
from ssdevice.export.onnx.editor import Editor, tag
from ssdevice.export.onnx.files import WeightFile, app_functions, graph_file, save_graph
from ssdevice.export.onnx.fused import add_norms, best_columns, join_regions
from ssdevice.export.onnx.quantization import quantize, schemes, simulated
from ssdevice.export.onnx.shown import OnnxShown, Written
from ssdevice.export.onnx.slots import SlotBook
from ssdevice.export.parity.gate import FLOAT_JITTER, QUANTIZED_JITTER, check, check_each
from ssdevice.export.parity.products import FLOAT32, QUANTIZED
from ssdevice.export.plan import INT8_HEAD, AppPlan, ExportPlan, Quant
from ssdevice.export.variants import (
    OpenIdentifiers,
    check_slots,
    template,
    variants_of,
    write_slots,
)
from ssdevice.export.weights import Schemes, Stored, by_name, floats_note, stored, unlisted
from ssdevice.model.step import StreamModel
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.onnx.adapter import ADAPTER_FILE, AdapterTensors, write_adapter
from ssdevice.runtime.onnx.engine import OnnxEngine

WEIGHTS = "weights"
WEIGHTS_FILE = "weights.bin"
FLOATS = "float32"
HALVES = "float16"
"""Types of the cache: attention rounds a call's own rows to it as well, so that later calls see the
same.
"""
TOOLS = ("torch", "transformers", "onnx", "onnxruntime")


class OnnxExporter(Exporter):
    """``step``, ``prefill`` and ``step_plain`` for ONNX Runtime on CPUs."""

    bits = {Quant.FP32: 32.0, Quant.INT8: 8.1, Quant.INT4: 5.0}  # noqa: RUF012
    schedule = Schedule.DEFERRED
    # SmolLM2, INT4: prompts of 20, 70 and 300 tokens take 45, 152 and 490 ms; with 64 they take
    # 77, 170 and 457.
    chunk = 32
    repeats = 4  # docs/performance.md
    short = 2
    several_apps = True
    chooses = True
    calibrates = frozenset({Quant.INT4})
    smooths = frozenset({Quant.INT8})

    def schemes(self, plan: ExportPlan) -> Schemes:
        return schemes(plan.options.quant)

    def check(self, plan: ExportPlan) -> None:
        if not plan.merged:
            check_slots(plan)

    def prepare(self, job: ExportJob) -> ExportJob:
        return job.folded()

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        """Write the graphs and ``weights.bin``; see ``Exporter``."""
        plan = job.plan
        model = job.loaded.model
        argmax = plan.geometry.k == 1 or (plan.merged and model.draft_head is not None)
        # Attention with a soft cap has no kernel that reads halves: every call would widen the
        # whole cache.
        capped = getattr(model.backbone.config, "attn_logit_softcapping", None) is not None
        cache_dtype = FLOATS if plan.options.quant is Quant.FP32 or capped else HALVES
        with closing(WeightFile(folder / WEIGHTS_FILE)) as weights:
            writer = GraphWriter(plan, weights, cache_dtype, argmax)
            files, apps = (_export_merged if plan.merged else _export_slots)(job, writer, folder)
        self.products = writer.products
        notes = [INT8_HEAD] if plan.options.quant is Quant.INT4 else []
        notes += floats_note(writer.kept)
        return TargetResult(
            files, CacheForm.EXTERNAL, cache_dtype, (*notes, *job.notes), TOOLS, apps
        )

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare with the torch reference under the same quantization, app by app.

        Afterwards the job's model has the weights of the exported forms, so that nothing holds
        weights twice.
        """
        plan = job.plan
        quant = job.plan.options.quant
        whole = {role: path for role, path in result.files.items() if role != WEIGHTS}
        jitter, bounds = (
            (FLOAT_JITTER, FLOAT32) if quant is Quant.FP32 else (QUANTIZED_JITTER, QUANTIZED)
        )

        def check_app(app: AppPlan, one: ExportJob) -> Mapping[str, float]:
            kept = result.apps.get(app.name)
            files = {
                function: folder / path
                for function, path in (kept.functions if kept else whole).items()
            }
            tensors = (
                AdapterTensors(folder / kept.files[0], plan.identity.sha256)
                if kept and kept.files
                else None
            )
            engine = OnnxEngine(
                files,
                one.plan.geometry,
                result.cache_dtype,
                EngineOptions(threads=1),
                adapter=tensors,
            )
            within = simulated(
                one.loaded.model, quant, not plan.merged, keep=False, cache_dtype=result.cache_dtype
            )
            with within, EngineDriver(engine) as driver:
                return check(
                    one, driver, jitter, OnnxShown(engine, self.products, not plan.merged), bounds
                )

        return check_each(job, check_app)


Files = tuple[dict[str, str], dict[str, App]]
"""The files of a bundle by role, and the entries of separate apps."""


def _export_merged(job: ExportJob, writer: "GraphWriter", folder: Path) -> Files:
    specs = job.plan.functions(CacheForm.EXTERNAL, writer.cache_dtype)
    table = writer.table(job.loaded.model)
    files = {WEIGHTS: WEIGHTS_FILE}
    for number, (name, spec) in enumerate(specs.items()):
        job.report("write the graphs", number, len(specs), name)
        files[name] = f"{name}.onnx"
        writer.write(trace(job, spec, table), spec, folder / files[name])
    return files, {}


def _export_slots(job: ExportJob, writer: "GraphWriter", folder: Path) -> Files:
    """The graphs of every variant the apps need, their slots' layout, and each app's adapter."""
    plan = job.plan
    files = {WEIGHTS: WEIGHTS_FILE, LAYOUT_ROLE: LAYOUT_FILE}
    wanted = variants_of(plan.apps, plan.function_names)
    steps = sum(len(added) for _, added in wanted)
    made: list[Variant] = []
    plain: dict[bool, dict[str, Slot]] = {}
    for variant, added in wanted:
        model = template(job, variant)
        specs = model.plan.functions(CacheForm.EXTERNAL, writer.cache_dtype)
        table = writer.table(model.loaded.model, slotted=True)
        # The T = 1 graph of shared streams is that of a plain LoRA, so an adapter holds the slots
        # of both.
        book = SlotBook(plan.options.quant is not Quant.FP32, dict(plain.get(variant.lora, {})))
        for name in added:
            file = graph_file(name, variant)
            job.report("write the graphs", len(files) - 2, steps, f"{name} of {variant.name}")
            graph = trace(model, specs[name], table, variant)
            writer.write(graph, specs[name], folder / file, book)
            files[f"{name}:{variant.name}"] = file
        plain.setdefault(variant.lora, book.slots)
        functions = app_functions(variant, plan.function_names)
        slots = tuple(book.slots.values())
        identifiers = IDENTIFIERS if variant.streams is not None else ""
        made.append(replace(variant, functions=functions, slots=slots, identifiers=identifiers))
    app_file = ADAPTER_FILE, partial(write_adapter, base_sha256=plan.identity.sha256)
    return files, write_slots(
        plan, SlotLayout(plan.identity.hidden_size, tuple(made)), folder, app_file
    )


class GraphWriter:
    """Writes the traced graphs of one bundle.

    ``cache_dtype``: of the KV cache, the same for all graphs.

    ``argmax``: of every head only the best column is wanted, in all graphs of the bundle that share
    it.
    """

    def __init__(
        self, plan: ExportPlan, weights: WeightFile, cache_dtype: str, argmax: bool
    ) -> None:
        self.plan = plan
        self.weights = weights
        self.cache_dtype = cache_dtype
        self.argmax = argmax
        self.kept: dict[str, int] = {}
        self.products: dict[Path, list[Written]] = {}

    def table(self, model: StreamModel, slotted: bool = False) -> list[Stored]:
        """The table of a model's weights; those that no graph stores in integers are ``kept``."""
        table = stored(model, schemes(self.plan.options.quant), slotted)
        self.kept |= unlisted(table)
        return table

    def write(
        self, edit: Editor, spec: FunctionSpec, file: Path, book: SlotBook | None = None
    ) -> None:
        """Rewrite, quantize and save a graph; with a ``book`` its low-rank terms become slots."""
        add_norms(edit)
        quantize(edit, self.plan.options.quant, self.kept, book)
        if self.argmax:
            best_columns(edit)
        join_regions(edit)
        shown = [
            one for one in edit.products if not one.output.is_graph_output()
        ]  # others are compared as they are
        self.products[file.absolute()] = [
            (one.weights, str(one.source.name), str(one.output.name)) for one in shown
        ]
        save_graph(edit.model, spec, file, self.weights)


def trace(
    job: ExportJob, spec: FunctionSpec, table: Sequence[Stored], variant: Variant | None = None
) -> Editor:
    """The graph of one function as it was traced, linears as placeholders, with the rows of the
    model's ``table``.

    ``variant``: the stream identifiers, if it has any, are an input behind those of the contract.
    """
    plan = job.plan
    model = exportable(job.loaded.model)
    module = function_module(spec.name, model, plan.geometry, plan.schedule)
    form: torch.nn.Module = ExternalCacheForm(spec.name, module, plan.geometry.kv_heads).eval()
    inputs = list(spec.inputs)
    if variant is not None and variant.streams is not None:
        assert model.streams is not None
        form = OpenIdentifiers(form, model.streams)
        inputs.append(TensorSpec(IDENTIFIERS, tuple(model.streams.identifiers.shape), FLOATS))
    try:
        graph = tracing.trace(form, inputs, [tensor.name for tensor in spec.outputs])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{plan.identity.model_type}: {spec.name}: {error}") from error
    tag(graph.model, by_name(form, table))
    return graph
