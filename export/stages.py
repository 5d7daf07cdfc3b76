"""The stages of an export, in order: each does one thing, and any failure leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ssdevice import __version__
from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.manifest import (
    AdapterKind,
    App,
    CacheDtype,
    GeometrySpec,
    Manifest,
    ModelIdentity,
)
from ssdevice.data import Example
from ssdevice.export.calibration.job import calibrated_job, calibration_notes, chosen_rows
from ssdevice.export.plan import (
    AppPlan,
    AppResult,
    Exporter,
    ExportJob,
    ExportOptions,
    ExportPlan,
    TargetResult,
    make_plan,
)
from ssdevice.export.target import exporter
from ssdevice.progress import Report
from ssdevice.text.plain_prompt import NOTE as PLAIN_PROMPT
from ssdevice.text.tokenizer import TOKENIZER_FILE, ChatTokenizer

TOKENIZER_ROLE = "tokenizer"


@dataclass
class Export:
    """What the stages hand on; ``folder`` is the bundle in the making."""

    plan: ExportPlan
    target: Exporter
    folder: Path
    report: Report
    tokenizer: ChatTokenizer | None = None
    examples: list[Example] = field(default_factory=list)
    job: ExportJob | None = None
    result: TargetResult | None = None
    gate: Mapping[str, float] = field(default_factory=dict)


def read_text(export: Export) -> None:
    """Tokenizer, chat template and stop tokens of the model's folder, and the rows to calibrate with."""
    export.tokenizer = ChatTokenizer.open(export.plan.folder)
    if export.plan.options.calibrate:
        export.examples = chosen_rows(export.plan.options.calibrate)


def load_model(export: Export) -> None:
    """The base with the first app's adapter and its streams on top, in the form that the target writes."""
    export.job = export.target.prepare(ExportJob.of(export.plan, export.report))


def calibrate_weights(export: Export) -> None:
    """The job's weights rounded with the apps' rows, where that was asked for."""
    assert export.job is not None and export.tokenizer is not None
    if export.examples:
        export.job = calibrated_job(export.job, export.target, export.examples, export.tokenizer)


def write_target(export: Export) -> None:
    """The target's own files."""
    assert export.job is not None
    export.result = export.target.export(export.job, export.folder)


def check_parity(export: Export) -> None:
    """The written files against the torch reference; raises ParityError."""
    assert export.job is not None and export.result is not None
    export.gate = export.target.gate(export.job, export.folder, export.result)


STAGES: tuple[tuple[str, Callable[[Export], None], int], ...] = (
    ("read the tokenizer", read_text, 1),
    ("load the model", load_model, 4),
    ("calibrate", calibrate_weights, 1),
    ("write the graphs", write_target, 59),
    ("check parity", check_parity, 35),
)
"""Every stage with its part of an export's time, in hundredths."""


class Whole:
    """The report of a whole export: what a stage says of itself moves it forward, and never back."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._name, self._begun, self._share, self._reached = "", 0, 0, 0

    def begin(self, name: str, share: int) -> None:
        """The next stage, which is ``share`` hundredths of the whole."""
        self._name, self._begun, self._share = name, self._begun + self._share, share
        self(name, 0, 1, "")

    def __call__(self, _: str, done: int, total: int, detail: str) -> None:
        self._reached = max(self._reached, self._begun + self._share * done // max(1, total))
        self._report("export", self._reached, 100, f"{self._name}, {detail}" if detail else self._name)


def run_stages(export: Export) -> None:
    """Every stage in order."""
    report, export.report = export.report, (whole := Whole(export.report))
    for name, stage, share in STAGES:
        whole.begin(name, share)
        stage(export)
    report("export", 100, 100, "done")


def export_bundle(options: ExportOptions, report: Report) -> Bundle:
    """Plan, make and publish a bundle; whatever fails or interrupts leaves nothing behind.

    Raises InputError for what cannot be exported as asked, ParityError for an export that computes something else.
    """
    target = exporter(options)
    return export_plan(make_plan(options, target), target, report)


def export_plan(plan: ExportPlan, target: Exporter, report: Report) -> Bundle:
    """``export_bundle`` for a plan that was made before."""
    options = plan.options
    with BundleWriter(options.out, overwrite=options.overwrite) as writer:
        export = Export(plan, target, writer.folder, report)
        run_stages(export)
        assert export.tokenizer is not None and export.result is not None
        writer.add_file(TOKENIZER_FILE, export.tokenizer.tokenizer_json, TOKENIZER_ROLE)
        for file in export.result.files:
            writer.declare(file.path, file.role)
        for app in export.result.apps.values():
            for path in app.files:
                writer.declare(path)
        return writer.commit(make_manifest(export))


def make_manifest(export: Export) -> Manifest:
    """What the bundle says of itself; ``files`` and ``roles`` are the writer's to fill."""
    plan, result = export.plan, export.result
    assert export.tokenizer is not None and result is not None
    settings, identity, g = plan.settings, plan.identity, plan.geometry
    streams = settings.streams if settings is not None else None
    mode = streams.mode if streams is not None else None
    apps = tuple(make_app(export, app) for app in plan.apps)
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
        apps=apps,
        default_app=apps[0].name,
        calibrated_rows=len(export.examples),
        notes=(
            *((PLAIN_PROMPT,) if export.tokenizer.plain else ()),
            *calibration_notes(plan, len(export.examples)),
            *result.notes,
        ),
        parity=dict(export.gate),
    )


def make_app(export: Export, app: AppPlan) -> App:
    """What the manifest says of an app."""
    plan, result = export.plan, export.result
    assert result is not None
    alone = AppResult(AdapterKind.MERGED if app.folder is not None else AdapterKind.BASE)
    kept = alone if plan.merged else result.apps[app.name]
    return App(
        name=app.name,
        kind=kept.kind,
        base_sha256=plan.identity.sha256,
        mode=app.mode,
        msa_layers=app.msa_layers,
        instruction=app.instruction,
        rank=app.rank(),
        folder=kept.folder,
        files=kept.files,
        functions=dict(kept.functions),
    )
