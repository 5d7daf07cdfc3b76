"""Calibration as a stage of an export: layer by layer, on what the layers before it give once they
are rounded.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ssdevice.data import Example, read_examples
from ssdevice.errors import SSDeviceError
from ssdevice.export.calibration import own_text
from ssdevice.export.calibration.grid import Grid, calibrated
from ssdevice.export.calibration.rows import Rows, tokenized
from ssdevice.export.calibration.smoothing import NOTE, smooth, texts
from ssdevice.export.exporter import Exporter, ExportJob
from ssdevice.export.plan import AppPlan, ExportPlan
from ssdevice.export.weights import Schemes, multiplies, stored
from ssdevice.model.mapped import release
from ssdevice.model.step import StreamModel
from ssdevice.text.tokenizer import Sample


@torch.no_grad()
def calibrate(
    model: StreamModel, rows: Sequence[Sample], schemes: Schemes, report: Callable[[int], None]
) -> None:
    """Give every linear of the layers whose scheme has a grid weights on it.

    ``schemes``: the target's table. ``report`` hears which layer begins. Raises SSDeviceError for
    rows on which the model computes numbers that are not finite.
    """
    passing = Rows(model, rows)
    grid_of = {
        module: one.scheme.grid
        for one in stored(model, schemes)
        for module in one.modules
        if one.scheme.grid is not None and multiplies(module)
    }
    for number, layer in enumerate(model.backbone.layers):
        report(number)
        grids = {part: grid_of[part] for part in layer.modules() if part in grid_of}
        with _moments(list(grids)) as moments:
            passing.run(number, advance=False)
        for group in _alike(moments, grids):
            if not moments[group[0]].isfinite().all():
                raise SSDeviceError(
                    f"calibration: layer {number} gives values that are not finite; see the rows' "
                    "text"
                )
            values = calibrated(
                torch.cat([part.weight for part in group]), moments[group[0]], grids[group[0]]
            )
            for part, own in zip(
                group, torch.split(values, [part.out_features for part in group]), strict=True
            ):
                part.weight.data.copy_(own)
        passing.run(number, advance=True)
        release()


@contextmanager
def _moments(linears: Sequence[nn.Linear]) -> Iterator[dict[nn.Linear, Tensor]]:
    """Within this context: the sum of ``x xᵀ`` over all rows that a linear reads; those that read
    none are left out.
    """
    found: dict[nn.Linear, Tensor] = {}
    last: list[tuple[Tensor, Tensor]] = []  # several linears read one input

    def read(part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert multiplies(part)
        if not last or last[0][0] is not inputs[0]:
            x = inputs[0].reshape(-1, part.in_features)
            last[:] = [(inputs[0], x.T @ x)]
        found[part] = found[part].add_(last[0][1]) if part in found else last[0][1].clone()

    with ExitStack() as hooks:
        for part in linears:
            hooks.enter_context(part.register_forward_pre_hook(read))
        yield found


def _alike(
    moments: Mapping[nn.Linear, Tensor], grids: Mapping[nn.Linear, Grid]
) -> list[list[nn.Linear]]:
    """Linears that read the same inputs and have the same grid, together: their columns are rounded
    once.
    """
    groups: list[list[nn.Linear]] = []
    for part, own in moments.items():
        known = next(
            (g for g in groups if grids[g[0]] == grids[part] and torch.equal(moments[g[0]], own)),
            None,
        )
        if known is None:
            groups.append(known := [])
        known.append(part)
    return groups


ROWS = 128
"""Rows that are taken, at most: more change little and cost time."""


def chosen_rows(files: Sequence[Path]) -> list[Example]:
    """ROWS rows of all files, the same ones whenever they are asked for; raises InputError for a
    file without any.
    """
    examples = read_examples(files, require_completion=False)
    return random.Random(0).sample(examples, ROWS) if len(examples) > ROWS else examples


def calibrated_job(job: ExportJob, target: Exporter) -> ExportJob:
    """The job with weights rounded to the target's grid, if its plan has rows for that.

    A merged app's model is rounded as it is, streams included. Of separate apps, what they share is
    rounded: the base, on its own main rows.
    """
    plan = job.plan
    if not plan.calibration and not plan.own_text:
        return job
    if plan.merged:
        _calibrate(job, target, plan.calibrated_instruction)
        return job
    base = ExportJob.of(plan.of(AppPlan(None, None, False, "")), job.report)
    _calibrate(base, target, plan.calibrated_instruction)
    backbone = base.loaded.model.backbone
    path = backbone.family.layers_path  # their names in the Hugging Face model
    own = {f"{path}.{name}": weight.data for name, weight in backbone.layers.named_parameters()}
    return target.prepare(ExportJob.of(plan, job.report, calibrated=own))


def smoothed_job(job: ExportJob, target: Exporter) -> ExportJob:
    """The job with a smoothed model, if the target rounds the inputs of linears row by row.

    Separate apps share a base that is not changed: their adapters were trained beside it.
    """
    plan = job.plan
    if not plan.merged or plan.options.quant not in target.smooths:
        return job
    model = job.loaded.model
    total = len(model.backbone.layers)
    moved = smooth(
        model,
        texts(plan.tokenizer),
        lambda layer: job.report("smooth", layer, total, f"layer {layer + 1}"),
    )
    return replace(job, notes=(*job.notes, NOTE)) if moved else job


def _calibrate(job: ExportJob, target: Exporter, instruction: str) -> None:
    model = job.loaded.model
    plan = job.plan
    total = len(model.backbone.layers)
    if plan.own_text:
        rows = own_text.written(
            model.backbone,
            plan.tokenizer,
            instruction,
            plan.geometry.context,
            lambda done, of: job.report("calibrate", done, of, "writes its own text"),
        )
    else:
        rows = tokenized(plan.calibration, plan.tokenizer, instruction, plan.geometry.context)
    calibrate(
        model,
        rows,
        target.schemes(plan),
        lambda layer: job.report("calibrate", layer, total, f"layer {layer + 1}"),
    )
    job.report("calibrate", total, total, "")


def calibrated_rows(plan: ExportPlan) -> int:
    """How many rows weights are calibrated on; 0: they are rounded to nearest."""
    return own_text.ROWS if plan.own_text else len(plan.calibration)


def calibration_notes(plan: ExportPlan) -> tuple[str, ...]:
    """What the manifest says of the rows, for people."""
    if plan.own_text:
        whose = "conversations that the model wrote"
    elif not plan.calibration:
        return ()
    elif plan.merged:
        whose = "of the app's rows"
    else:
        whose = "of rows of the apps, without their adapters"
    number = calibrated_rows(plan)
    return (f"{plan.options.quant} weights of the layers were calibrated on {number} {whose}",)
