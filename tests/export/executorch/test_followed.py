"""Traced programs are followed product by product: a fault between two products of one deep layer
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import fx
from torch.export import ExportedProgram

pytest.importorskip("executorch")

from ssdevice.config import Mode, Schedule
from ssdevice.contract import PREFILL, CacheForm, functions
from ssdevice.errors import ParityError
from ssdevice.export.executorch import lowering
from ssdevice.export.executorch.exporter import ExecutorchExporter
from ssdevice.export.executorch.quantization import held_values, quantized
from ssdevice.export.executorch.speed import quick
from ssdevice.export.exporter import ExportJob
from ssdevice.export.parity.follow import Walk
from ssdevice.export.parity.products import FLOAT32, QUANTIZED
from ssdevice.export.parity.reference import random_prompt
from ssdevice.export.parity.traced import Recorder, TracedShown, follow_traced
from ssdevice.export.plan import Quant
from ssdevice.model.loading import LoadedModel
from ssdevice.model.step import StreamModel
from ssdevice.runtime.executorch.engine import CACHE_DTYPE
from tests.export.deep import deep_model, job_of
from tests.export.executorch import programs
from tests.export.executorch.test_families import tiny
from tests.export.faults import FAULTS
from tests.model.tiny import MODELS

LAYERS = 24
LAYER = 17
SLOW = pytest.mark.slow


def loaded(model: StreamModel) -> LoadedModel:
    return cast(LoadedModel, SimpleNamespace(model=model))


def job_for(model: StreamModel) -> ExportJob:
    """What lowering and gate read of an export."""
    job = job_of(model)
    job.plan.options = SimpleNamespace(chosen=lambda kind: kind())  # type: ignore[misc]
    return job


def traced(
    job: ExportJob, model: StreamModel, names: tuple[str, ...]
) -> dict[str, ExportedProgram]:
    specs = functions(job.plan.geometry, CacheForm.INTERNAL, CACHE_DTYPE)
    with quick():
        return {name: lowering.trace(name, specs[name], model, job.plan) for name in names}


class Deep:
    """The prefill of a model of 24 layers in INT8, traced once; faults are planted in its graph and
    removed again.
    """

    def __init__(self) -> None:
        model = quantized(deep_model("llama", LAYERS), Quant.INT8)[0]
        self.job = job_for(model)
        self.program = traced(self.job, model, (PREFILL,))[PREFILL]
        self.linears = {name: node for name, _, node in Recorder(self.program).linears}
        self.order = {node: at for at, node in enumerate(self.program.graph.nodes)}

    def placeholder(self, target: str) -> fx.Node:
        found = {spec.target: spec.arg.name for spec in self.program.graph_signature.input_specs}
        return next(node for node in self.program.graph.nodes if node.name == found[target])

    def linear(self, path: str) -> fx.Node:
        return self.linears[f"backbone.layers.{LAYER}.{path}.weight"]

    def one(self, operator: str, layer: int = LAYER) -> fx.Node:
        """The only node of an operator in a layer."""
        (found,) = (
            node for node in self.order if operator in str(node.target) and self.inside(node, layer)
        )
        return found

    def inside(self, node: fx.Node, layer: int = LAYER) -> bool:
        """Whether a node lies between the first and the last product of a layer."""
        start, end = (self.linears[f"backbone.layers.{layer}.{name}.weight"] for name in ENDS)
        return self.order[start] < self.order.get(node, -1) < self.order[end]

    def follow(self) -> dict[str, float]:
        """Follow a prompt of one and a half chunks."""
        g = self.job.plan.geometry
        spec = functions(g, CacheForm.INTERNAL, CACHE_DTYPE)[PREFILL]
        with held_values(self.job.loaded.model, Path()):
            walk = Walk(
                self.job, TracedShown({PREFILL: self.program}, {PREFILL: spec}, g), QUANTIZED
            )
            prompt = random_prompt(g, g.chunk + g.chunk // 2)
            walk.prefill(prompt[: g.chunk], 0)
            walk.prefill(prompt[g.chunk :], g.chunk)
        return {"rows": walk.follower.worst_rows, "product": walk.follower.worst_product}


ENDS = ("self_attn.q_proj", "mlp.down_proj")
Change = tuple[fx.Node, Callable[[Any], Any], Callable[[fx.Node], bool]]


@cache
def deep() -> Deep:
    return Deep()


@contextmanager
def changed(
    node: fx.Node, change: Callable[[Any], Any], reader: Callable[[fx.Node], bool]
) -> Iterator[None]:
    """In this context the readers of a node get another value."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(change, (node,))
    node.replace_all_uses_with(new, lambda user: user is not new and reader(user))
    try:
        yield
    finally:
        new.replace_all_uses_with(node)
        node.graph.erase_node(new)


def masked(change: Callable[[Any], Any], argument: int) -> Callable[[Deep], list[Change]]:
    """Change the scores (0) or the mask (1) before the softmax."""

    def plant(deep: Deep) -> list[Change]:
        total = deep.one("softmax").args[0]
        assert isinstance(total, fx.Node) and isinstance(total.args[argument], fx.Node)
        return [(total.args[argument], change, lambda user: user is total)]

    return plant


def stale_norm(deep: Deep) -> list[Change]:
    name = "module.model.backbone.layers.{}.post_attention_layernorm.weight"
    other = deep.program.state_dict[name.format(LAYER - 1)]
    return [(deep.placeholder(name.format(LAYER)), lambda _: other, lambda _: True)]


def rope_off_by_one(deep: Deep) -> list[Change]:
    tables = [node for node in deep.order if node.target is torch.ops.aten.embedding.default]
    shapes = {node for table in tables for node in table.users if "reshape" in str(node.target)}
    rotating = []
    for node in shapes:
        if sum(deep.inside(user) for user in node.users) == 2:  # queries and keys
            rotating.append(node)
    assert len(rotating) == 2  # cosines and sines
    return [(node, lambda value: value.roll(-1, -2), deep.inside) for node in rotating]


def missing_residual(deep: Deep) -> list[Change]:
    (added,) = deep.linear("mlp.down_proj").users
    (residual,) = (
        node for node in added.all_input_nodes if node is not deep.linear("mlp.down_proj")
    )
    return [(residual, torch.zeros_like, lambda user: user is added)]


def activation_off_by_1_percent(deep: Deep) -> list[Change]:
    return [(deep.one("silu"), lambda gate: gate * 1.01, lambda _: True)]


def cache_rows_one_off(deep: Deep) -> list[Change]:
    return [
        (
            deep.placeholder(f"values.{LAYER}"),
            lambda rows: rows.roll(1, -2),
            lambda user: "put" not in user.name,
        )
    ]


def keys_written_one_off(deep: Deep) -> list[Change]:
    state = deep.placeholder(f"keys.{LAYER}")
    (write,) = (user for user in state.users if "index_put" in str(user.target))
    assert isinstance(write.args[2], fx.Node)
    return [(write.args[2], lambda rows: rows.roll(1, -2), lambda user: user is write)]


BETWEEN: dict[str, tuple[Callable[[Deep], list[Change]], str]] = {
    "stale norm": (stale_norm, f"layer {LAYER}, mlp"),
    "rope off by one": (rope_off_by_one, f"layer {LAYER}"),
    "mask off by one": (
        masked(lambda mask: mask.roll(1, -1), 1),
        f"layer {LAYER}, self_attn.o_proj",
    ),
    "rows see the next one": (
        masked(lambda mask: mask.roll(-1, -2), 1),
        f"layer {LAYER}, self_attn.o_proj",
    ),
    "attention scaled": (
        masked(lambda scores: scores * 1.02, 0),
        f"layer {LAYER}, self_attn.o_proj",
    ),
    "activation off by 1 percent": (activation_off_by_1_percent, f"layer {LAYER}, mlp.down_proj"),
    "missing residual": (missing_residual, f"layer {LAYER + 1}, self_attn"),
    "cache rows one off": (cache_rows_one_off, f"layer {LAYER}, self_attn.o_proj"),
    "keys written one off": (keys_written_one_off, f"rows to commit, keys of layer {LAYER}"),
}


@pytest.mark.lowering
def test_a_right_program_of_24_layers_is_accepted() -> None:
    found = deep().follow()
    assert found["rows"] < QUANTIZED.rows / 20
    assert found["product"] < QUANTIZED.product / 20


@pytest.mark.lowering
@pytest.mark.parametrize("fault", BETWEEN)
def test_a_fault_between_products_of_one_layer_is_refused_with_its_place(fault: str) -> None:
    plant, place = BETWEEN[fault]
    with ExitStack() as stack:
        for change in plant(deep()):
            stack.enter_context(changed(*change))
        with pytest.raises(ParityError, match=place):
            deep().follow()


@pytest.mark.lowering
def test_an_export_is_refused_before_it_is_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidy = lowering.tidy

    def wrong(program: ExportedProgram) -> ExportedProgram:
        tidy(program)
        last = [node for node in program.graph.nodes if node.target is torch.ops.aten.silu.default][
            -1
        ]
        last.target = torch.ops.aten.relu.default
        return program

    def lowered(*_: object) -> None:
        raise AssertionError("the program was lowered")

    monkeypatch.setattr(lowering, "tidy", wrong)
    monkeypatch.setattr(lowering, "to_edge", lowered)
    job = programs.job(Quant.INT8, Mode.SHARED, Schedule.DEFERRED, tmp_path / "out")
    with pytest.raises(ParityError, match="prefill .* layer 1, mlp.down_proj reads rows"):
        ExecutorchExporter().export(job, tmp_path)


def follow(
    job: ExportJob, right: StreamModel, exported: StreamModel, quant: Quant
) -> dict[str, float]:
    """Trace every function of one model and follow it with another one as the reference."""
    specs = functions(job.plan.geometry, CacheForm.INTERNAL, CACHE_DTYPE)
    reference = quantized(right, quant)[0]
    model = quantized(exported, quant)[0]
    made = traced(job, model, tuple(specs))
    bounds = FLOAT32 if quant is Quant.FP32 else QUANTIZED
    with held_values(reference, Path()):
        return follow_traced(
            replace(job, loaded=loaded(reference)), specs, made, bounds, lambda _: None
        )


@SLOW
@pytest.mark.parametrize("quant", [Quant.FP32, Quant.INT8, Quant.INT4])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_right_programs_of_every_family_are_accepted(
    family: str, folded: bool, quant: Quant
) -> None:
    model, geometry = tiny(family)
    job = job_for(model)
    job.plan.geometry = geometry  # type: ignore[misc]
    if folded:
        assert model.streams is not None
        model.streams.fold()
    assert follow(job, model, model, quant)["products"] > 100


PLACES = {
    "a-missing-residual": "layer 18",  # where it is read
    "an-adapters-scaling-twice": "layer 23",
    "a-stream-identifier-swapped": "layer 22",
    "a-stale-last-norm": "lm_head",
}
OF_ARTIFACTS = {
    "saturating-products",
    "candidates-in-another-order",
    "cache-rows-one-off",
    "keys-and-values-swapped",
    "one-token-too-many",
}
"""Faults of results or kernels, which a model that is traced does not have."""


@SLOW
@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in OF_ARTIFACTS])
def test_programs_of_a_model_with_a_fault_in_one_layer_are_refused(fault: str) -> None:
    right = deep_model("llama", LAYERS)
    wrong = deep_model("llama", LAYERS)
    torch.manual_seed(0)
    FAULTS[fault](SimpleNamespace(model=wrong), LAYER)  # type: ignore[arg-type]
    with pytest.raises(ParityError, match=PLACES.get(fault, f"layer {LAYER}")):
        follow(job_for(right), right, wrong, Quant.INT8)
