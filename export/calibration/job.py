"""Calibration as a stage of an export: whose rows, through which model, and what the bundle says of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ssdevice.data import Example, read_examples
from ssdevice.export.calibration.calibrate import calibrate
from ssdevice.export.calibration.rows import tokenized
from ssdevice.export.calibration.smoothing import NOTE, smooth, texts
from ssdevice.export.exporter import Exporter, ExportJob
from ssdevice.export.plan import AppPlan, ExportPlan
from ssdevice.model.step import StreamModel

ROWS = 128
"""Rows that are taken, at most: more change little and cost time."""


def chosen_rows(files: Sequence[Path]) -> list[Example]:
    """ROWS rows of all files, the same ones whenever they are asked for; raises InputError for a file without any."""
    examples = read_examples(files, require_completion=False)
    return random.Random(0).sample(examples, ROWS) if len(examples) > ROWS else examples


def calibrated_job(job: ExportJob, target: Exporter) -> ExportJob:
    """The job with weights rounded to the target's grid, if its plan has rows for that.

    A merged app's model is rounded as it is, streams included. Of separate apps, what they share is rounded: the
    base, on its own main rows.
    """
    plan = job.plan
    if not plan.calibration:
        return job
    if plan.merged:
        _calibrate(job, target, plan.apps[0].instruction)
        return job
    base = ExportJob.of(plan.of(AppPlan(None, None, False, "")), job.report)
    _calibrate(base, target, "")
    return target.prepare(ExportJob.of(plan, job.report, calibrated=_by_name(base.loaded.model)))


def smoothed_job(job: ExportJob, target: Exporter) -> ExportJob:
    """The job with a smoothed model, if the target rounds the inputs of linears row by row.

    Separate apps share a base that is not changed: their adapters were trained beside it.
    """
    plan = job.plan
    if not plan.merged or plan.options.quant not in target.smooths:
        return job
    model = job.loaded.model
    total = len(model.backbone.layers)
    moved = smooth(model, texts(plan.tokenizer), lambda layer: job.report("smooth", layer, total, f"layer {layer + 1}"))
    return replace(job, notes=(*job.notes, NOTE)) if moved else job


def _calibrate(job: ExportJob, target: Exporter, instruction: str) -> None:
    model, plan = job.loaded.model, job.plan
    total = len(model.backbone.layers)
    calibrate(
        model,
        tokenized(plan.calibration, plan.tokenizer, instruction, plan.geometry.context),
        lambda linear, factor: target.grid(plan, linear, factor),
        lambda layer: job.report("calibrate", layer, total, f"layer {layer + 1}"),
    )
    job.report("calibrate", total, total, "")


def _by_name(model: StreamModel) -> dict[str, Tensor]:
    """Weights of the layers by their names in the Hugging Face model."""
    path = model.backbone.family.layers_path
    return {f"{path}.{name}": weight.data for name, weight in model.backbone.layers.named_parameters()}


def calibration_notes(plan: ExportPlan) -> tuple[str, ...]:
    """What the manifest says of it."""
    if not plan.calibration:
        return ()
    whose = "the app's rows" if plan.merged else "rows of the apps, without their adapters"
    return (f"{plan.options.quant} weights of the layers were calibrated on {len(plan.calibration)} of {whose}",)
