"""LoRA slots of a program: the factors of apps as state that a host fills, instead of weights.

All apps of a bundle share one program, so they share its shape: mode, N_s, the start of streams,
and the rank of every slot, the largest of all; smaller ranks are padded with zeros, which change
nothing. A slot's factors are the right operands of products, ``down [1, inputs, rank]`` and ``up
[1, rank, outputs]``, named after their states.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from ssdevice.adapters.slots import IDENTIFIERS, Slot, SlotKind, SlotLayout, Variant
from ssdevice.adapters.weights import AdapterWeights
from ssdevice.errors import ConfigError
from ssdevice.export.exporter import ExportJob
from ssdevice.export.plan import AppPlan, ExportPlan
from ssdevice.export.variants import template
from ssdevice.export.weights import low_rank_terms
from ssdevice.model.lora import LoraLinear
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import LowRank
from ssdevice.runtime.executorch.program import SET_ADAPTER

OWNER = "module.model"
"""The path of the model in a program's functions; names of slots begin with it."""


class SlotFactors(nn.Module):
    """``LowRank`` with factors as state: ``down [1, inputs, rank]``, ``up [1, rank, outputs]``."""

    down: Tensor
    up: Tensor

    def __init__(self, inputs: int, outputs: int, rank: int, activation: bool) -> None:
        super().__init__()
        self.register_buffer("down", torch.zeros(1, inputs, rank))
        self.register_buffer("up", torch.zeros(1, rank, outputs))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """``[1, R, inputs] -> [1, R, outputs]``."""
        h = torch.bmm(x.reshape(1, -1, x.shape[-1]), self.down)
        y = torch.bmm(nn.functional.silu(h) if self.activation else h, self.up)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def slots_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names, as in a program's functions, and tensors of a model's slots."""
    for name, part in model.named_modules():
        if isinstance(part, SlotFactors):
            yield f"{OWNER}.{name}.down", part.down
            yield f"{OWNER}.{name}.up", part.up
    streams = getattr(model, "streams", None)
    if streams is not None and "identifiers" in dict(streams.named_buffers(recurse=False)):
        yield f"{OWNER}.{IDENTIFIERS}", streams.identifiers


@contextmanager
def filled(model: nn.Module, tensors: Mapping[str, NDArray[np.float32]]) -> Iterator[None]:
    """In this context the slots of a model have an app's ``tensors``, by their names; before and
    after it, zeros.
    """
    slots = dict(slots_of(model))
    for name, tensor in tensors.items():
        slots[name].copy_(torch.from_numpy(tensor))
    try:
        yield
    finally:
        for slot in slots.values():
            slot.zero_()


def check_apps(plan: ExportPlan) -> AppPlan:
    """The app that determines the program's variant.

    Raises ConfigError for apps that cannot share a program.
    """
    apps = [app for app in plan.apps if app.folder is not None]
    if not (streaming := [app for app in apps if app.settings is not None]):
        return apps[0] if apps else plan.apps[0]
    first = streaming[0]
    for app in apps:
        if app.settings is None and first.variant.lora:
            continue  # a LoRA without streams decodes plainly in the same slots
        if app.variant != first.variant:
            raise ConfigError(
                f"apps {first.name!r} ({first.variant.described}) and {app.name!r} "
                f"({app.variant.described}) cannot share one ExecuTorch program; export a bundle "
                "for each"
            )
    return first


def slot_model(job: ExportJob, read: Sequence[AdapterWeights]) -> tuple[StreamModel, SlotLayout]:
    """The base with a slot wherever an adapter has factors, and the slots' layout, from which apps
    are added later.
    """
    plan = job.plan
    variant = check_apps(plan).variant
    model = template(job, variant).loaded.model
    ranks: dict[tuple[SlotKind, str], int] = {}
    for weights in read:
        for key, pair in weights.factors.items():
            ranks[key] = max(ranks.get(key, 0), len(pair.down))
    terms = low_rank_terms(model)
    made: dict[LowRank, SlotFactors] = {}
    for term, key in terms.items():
        if key[0] is SlotKind.STREAM or key in ranks:
            rank = max(ranks.get(key, 0), 1)
            made[term] = SlotFactors(
                term.down.in_features, term.up.out_features, rank, term.activation
            )
    _install(model, made)
    if model.streams is not None:
        # a second path to slots that layers hold, which a trace takes for more state
        model.streams.adapters.clear()
        identifiers = model.streams.identifiers.detach()[: model.gamma]
        del model.streams.identifiers
        model.streams.register_buffer("identifiers", torch.zeros_like(identifiers))
    names = {id(part): name for name, part in model.named_modules()}
    # A LoRA without streams decodes plainly in the same slots as streams that act on main rows.
    slots = []
    for term, part in made.items():
        kind, source = terms[term]
        slot = Slot(
            kind,
            (source,),
            part.down.shape[1],
            (part.up.shape[2],),
            state=f"{OWNER}.{names[id(part)]}",
            rank=part.down.shape[2],
        )
        slots.append(slot)
    state = f"{OWNER}.{IDENTIFIERS}" if model.streams is not None else ""
    every = [variant, Variant(lora=False)]
    if variant.lora:
        every.append(Variant(lora=True))
    variants = []
    for one in {one.name: one for one in every}.values():
        functions = {name: name for name in one.own(plan.function_names)}
        variants.append(replace(one, functions=functions, slots=tuple(slots), identifiers=state))
    return model, SlotLayout(plan.identity.hidden_size, tuple(variants))


def _install(model: StreamModel, made: Mapping[LowRank, SlotFactors]) -> None:
    """Replace factors by their slots; a LoRA without slots is removed."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, LowRank) and child in made:
                setattr(owner, name, made[child])
            elif isinstance(child, LoraLinear) and child.adapter not in made:
                setattr(owner, name, child.base)


def touch(model: nn.Module) -> None:
    """Write to every slot, so that a trace makes it mutable state; ``untouch`` removes the writes
    again.
    """
    at = torch.zeros(1, dtype=torch.int64)
    for _, state in slots_of(model):
        torch.ops.aten.index_put_(state, [at], torch.zeros(()))


def untouch(program: ExportedProgram, names: Collection[str]) -> None:
    """Remove the writes of ``touch`` from a lowered program; its slots stay state."""
    signature = program.graph_signature
    graph = program.graph_module.graph
    output = graph.output_node()
    inputs = {buffer: name for name, buffer in signature.inputs_to_buffers.items()}
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    results = list(cast(Sequence[Any], output.args[0]))
    for i, spec in enumerate(signature.output_specs):
        if spec.kind is OutputKind.BUFFER_MUTATION and spec.target in names:
            results[i] = placeholders[inputs[spec.target]]
            spec.arg = copy.copy(spec.arg)
            spec.arg.name = results[i].name
    output.args = (tuple(results),)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def set_adapter(model: StreamModel) -> dict[str, ExportedProgram]:
    """The function that fills a model's slots, by its name; nothing for a model without any."""
    values = tuple(torch.zeros_like(state) for _, state in sorted(slots_of(model)))
    return (
        {SET_ADAPTER: torch.export.export(SetAdapter(model).eval(), values, strict=False)}
        if values
        else {}
    )


class SetAdapter(nn.Module):
    """``set_adapter``: sets every slot to its input, in the order of their names."""

    def __init__(self, model: StreamModel) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Takes the slots' new values and returns only their number."""
        slots = sorted(slots_of(cast(nn.Module, self.module.model)))
        for (_, state), value in zip(slots, tensors, strict=True):
            state.copy_(value)
        return (torch.full((1,), len(slots), dtype=torch.int32),)
