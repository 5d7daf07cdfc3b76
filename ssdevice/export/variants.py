"""The graphs of a bundle with separate apps: a set for each kind of app, traced with placeholders
for adapters.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ssdevice.adapters.slots import EXAMPLE_RANK, LAYOUT_FILE, SlotKind, SlotLayout, Variant
from ssdevice.adapters.storage import ADAPTERS, stored
from ssdevice.adapters.weights import AdapterWeights, fill
from ssdevice.bundle.manifest import AdapterKind, App
from ssdevice.config import to_json
from ssdevice.contract import ONE_ROW, PREFILL
from ssdevice.errors import UnsupportedModelError
from ssdevice.export.exporter import ExportJob
from ssdevice.export.plan import AppPlan, ExportPlan
from ssdevice.export.weights import multiplies
from ssdevice.model.families import family_of
from ssdevice.model.loading import LoadedModel, adopt, build, load_hf
from ssdevice.model.lora import LoraLinear
from ssdevice.model.streams import LowRank, Streams
from ssdevice.runtime.target import AppFile


def variants_of(
    apps: tuple[AppPlan, ...], names: Sequence[str]
) -> list[tuple[Variant, tuple[str, ...]]]:
    """The variants that these apps need, and both variants of plain decoding, so that any LoRA can
    be added later.

    Each with the functions that it adds; other functions are graphs of other variants: the T = 1
    graph of an app with streams is that of plain decoding with or without a LoRA. ``names``: the
    functions that the bundle has.
    """
    found = {v.name: v for v in (Variant(lora=False), Variant(lora=True))}
    for app in apps:
        found.setdefault(app.variant.name, app.variant)
    drafting = tuple(name for name in names if name not in ONE_ROW)
    plain = (PREFILL, *(name for name in ONE_ROW if name in names))
    return [(v, plain if v.streams is None else drafting) for v in found.values()]


def check_slots(plan: ExportPlan) -> None:
    """Raise InputError for an app that slots beside the linears of the layers could not hold."""
    layers = f"{family_of(plan.identity.model_type).layers_path}."
    for app in plan.apps:
        if app.folder is None:
            continue
        for kind, name in AdapterWeights.read(app.folder).factors:
            if kind is SlotKind.LORA and not name.startswith(layers):
                raise UnsupportedModelError(
                    f"{app.folder}: its LoRA changes {name}, slots are for linears of layers: "
                    "export this app by itself"
                )


def template(job: ExportJob, variant: Variant) -> ExportJob:
    """A job whose model has the base's weights, and placeholders for an app's weights."""
    plan = job.plan
    if variant.streams is None:
        plan = plan.of(AppPlan(None, None, variant.lora, variant.name))
    hf = adopt(load_hf(plan.folder, scratch=plan.options.out.parent), job.calibrated)
    model = build(
        hf,
        variant.streams and replace(variant.streams, gamma=plan.geometry.gamma),
        plan.geometry.context,
    )
    if variant.lora:
        open_slots(model.backbone.layers)
    for part in model.modules():
        if isinstance(part, LowRank):  # their initial zeros would be taken for one shared weight
            nn.init.normal_(part.up.weight, std=0.1)
    return replace(job, plan=plan, loaded=LoadedModel(plan.identity, model.eval(), None), notes=())


def write_slots(
    plan: ExportPlan, layout: SlotLayout, folder: Path, app_file: AppFile
) -> dict[str, App]:
    """Write the layout, and the tensors of every app to a file of its own; returns the apps'
    entries.
    """
    (folder / LAYOUT_FILE).write_text(json.dumps(to_json(layout)), encoding="utf-8")
    (file, write) = app_file
    found = {}
    for app in plan.apps:
        variant = layout.variant(app.variant.name)
        assert variant is not None
        kept: dict[str, Any] = {"functions": dict(variant.functions)}
        if app.folder is not None:
            own = f"{ADAPTERS}/{app.name}"
            (folder / own).mkdir(parents=True, exist_ok=True)
            tensors = fill(
                AdapterWeights.read(app.folder), variant, plan.geometry.gamma, layout.hidden
            )
            write(folder / own / file, stored(tensors, plan.options.adapter_precision))
            kept |= {"folder": own, "files": (f"{own}/{file}",)}
        found[app.name] = app.entry(app.name, plan.identity.sha256, AdapterKind.SLOT, **kept)
    return found


def open_slots(layers: nn.ModuleList) -> None:
    """Add a low-rank term to every linear of the layers."""
    for owner in list(layers.modules()):
        if isinstance(owner, LoraLinear):
            continue
        for name, child in list(owner.named_children()):
            if multiplies(child):
                setattr(
                    owner,
                    name,
                    LoraLinear(child, LowRank(child.in_features, child.out_features, EXAMPLE_RANK)),
                )


class OpenIdentifiers(nn.Module):
    """A function whose stream identifiers are its last argument instead of a weight."""

    def __init__(self, form: nn.Module, streams: Streams) -> None:
        super().__init__()
        self.form = form
        owner = next(name for name, module in form.named_modules() if module is streams)
        self.name = f"{owner}.identifiers"

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The function's inputs, then ``[γ, hidden]``."""
        return cast(
            tuple[Tensor, ...],
            torch.func.functional_call(self.form, {self.name: tensors[-1]}, tensors[:-1]),
        )
