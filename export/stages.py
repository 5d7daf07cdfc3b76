"""The stages of an export, in order: each does one thing, and any failure leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ssdevice import __version__
from ssdevice.bundle import Bundle, BundleWriter
from ssdevice.config import Mode
from ssdevice.export.plan import Exporter, ExportJob, ExportOptions, ExportPlan, Report, TargetResult, make_plan
from ssdevice.export.targets import exporter
from ssdevice.manifest import (
    AdapterKind,
    App,
    CacheDtype,
    GeometrySpec,
    Manifest,
    ModelIdentity,
)
from ssdevice.text import TOKENIZER_FILE, ChatTokenizer

TOKENIZER_ROLE = "tokenizer"
BASE_APP = "base"
"""Name of the only app of a bundle without adapters."""


@dataclass
class Export:
    """What the stages hand on; ``folder`` is the bundle in the making."""

    plan: ExportPlan
    target: Exporter
    folder: Path
    report: Report
    tokenizer: ChatTokenizer | None = None
    job: ExportJob | None = None
    result: TargetResult | None = None
    gate: Mapping[str, float] = field(default_factory=dict)


def read_text(export: Export) -> None:
    """Tokenizer, chat template and stop tokens of the model's folder."""
    export.tokenizer = ChatTokenizer.open(export.plan.folder)


def load_model(export: Export) -> None:
    """The base with the adapter merged and its streams on top."""
    from ssdevice.model.loading import load

    plan = export.plan
    gamma = plan.geometry.gamma or None
    loaded = load(plan.folder, plan.adapter, plan.geometry.context, gamma)
    export.job = ExportJob(plan, loaded, export.report)


def write_target(export: Export) -> None:
    """The target's own files."""
    assert export.job is not None
    export.result = export.target.export(export.job, export.folder)


def check_parity(export: Export) -> None:
    """The written files against the torch reference; raises ParityError."""
    assert export.job is not None and export.result is not None
    export.gate = export.target.gate(export.job, export.folder, export.result)


STAGES: tuple[tuple[str, Callable[[Export], None]], ...] = (
    ("read the tokenizer", read_text),
    ("load the model", load_model),
    ("write the graphs", write_target),
    ("check parity", check_parity),
)


def run_stages(export: Export) -> None:
    """Every stage in order, reported as it begins and ends."""
    for number, (name, stage) in enumerate(STAGES):
        export.report("export", number, len(STAGES), name)
        stage(export)
    export.report("export", len(STAGES), len(STAGES), "done")


def export_bundle(options: ExportOptions, report: Report) -> Bundle:
    """Plan, make and publish a bundle; whatever fails or interrupts leaves nothing behind.

    Raises InputError for what cannot be exported as asked, ParityError for an export that computes something else.
    """
    target = exporter(options.target)
    plan = make_plan(options, target)
    with BundleWriter(options.out, overwrite=options.overwrite) as writer:
        export = Export(plan, target, writer.folder, report)
        run_stages(export)
        assert export.tokenizer is not None and export.result is not None
        writer.add_file(TOKENIZER_FILE, export.tokenizer.tokenizer_json, TOKENIZER_ROLE)
        for file in export.result.files:
            writer.declare(file.path, file.role)
        return writer.commit(make_manifest(export))


def make_manifest(export: Export) -> Manifest:
    """What the bundle says of itself; ``files`` and ``roles`` are the writer's to fill."""
    plan, result = export.plan, export.result
    assert export.tokenizer is not None and result is not None
    settings, identity, g = plan.settings, plan.identity, plan.geometry
    streams = settings.streams if settings is not None else None
    mode = streams.mode if streams is not None else None
    merged = plan.options.adapters[0][0] if plan.options.adapters else None
    app = App(
        name=merged or BASE_APP,
        kind=AdapterKind.MERGED if merged else AdapterKind.BASE,
        base_sha256=identity.sha256,
        mode=mode,
        instruction=settings.instruction if settings is not None else "",
        rank=streams.lora_rank if streams is not None and mode is Mode.SHARED else 0,
    )
    return Manifest(
        tools={"ssdevice": __version__, **(result.tools or {})},
        model=ModelIdentity(
            model_type=identity.model_type,
            parameters=sum(plan.parameters.values()),
            layers=identity.layers,
            hidden_size=identity.hidden_size,
            vocab=identity.vocab,
            sha256=identity.sha256,
        ),
        target=plan.options.target,
        precision=plan.options.quant,
        mode=mode,
        schedule=plan.schedule,
        cache=result.cache,
        cache_dtype=CacheDtype(result.cache_dtype),
        geometry=GeometrySpec.of(g),
        msa_layers=streams.msa_layers if streams is not None else 0,
        functions=tuple(plan.functions(result.cache, result.cache_dtype).values()),
        chat=export.tokenizer.chat,
        apps=(app,),
        default_app=app.name,
        notes=result.notes,
        parity=dict(export.gate),
    )
