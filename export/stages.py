"""The stages of an export, in order: each does one thing, and any failure leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ssdevice.errors import InputError
from ssdevice.export.plan import Exporter, ExportJob, ExportPlan, Report, TargetResult
from ssdevice.text import ChatTokenizer


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


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse an output that exists, before any work; raises InputError."""
    if out.exists() and not overwrite:
        raise InputError(f"--out {out} exists; add --overwrite to replace it, or choose another folder")
