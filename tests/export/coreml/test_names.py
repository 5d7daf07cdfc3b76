"""Inputs, outputs and states have the contract's names whatever a model's operators are called."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
pytest.importorskip("torch", reason="needs the export extra")

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ssdevice import contract
from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.contract import (
    CHUNK,
    COUNT,
    KEYS,
    PREFILL,
    ROOT,
    STEP,
    TOKENS,
    CacheForm,
    FunctionSpec,
    Geometry,
    functions,
)
from ssdevice.export.coreml import exporter as conversion
from ssdevice.export.coreml.exporter import CACHE_DTYPE, convert, save
from ssdevice.export.mlprogram.graph import functional, name_inputs
from ssdevice.export.mlprogram.options import CoreMLOptions, Deployment
from ssdevice.export.mlprogram.program import ct, to_program
from ssdevice.mil.reader import Package
from ssdevice.model.loading import build
from ssdevice.runtime.coreml.engine import check_package
from ssdevice.tree import Tree
from tests.model.tiny import tiny_model

TREE = Tree.of([[0], [1]])
NAMES = sorted(
    value for key, value in vars(contract).items() if key.isupper() and isinstance(value, str)
)
"""Of tensors and functions."""


def converted(family: str, function: str, out: Path) -> tuple[Package, dict[str, FunctionSpec]]:
    """One function of a tiny model with streams as a package, and what the contract says of it."""
    model = build(
        tiny_model(family), StreamConfig(Mode.LOSSLESS, TREE.depth, 1, adapter_rank=4), 24
    ).eval()
    backbone = model.backbone
    vocab = int(backbone.config.vocab_size)
    geometry = Geometry(
        backbone.num_layers,
        backbone.kv_heads,
        backbone.head_dim,
        vocab,
        TREE.depth,
        TREE.width,
        TREE,
        24,
        5,
    )
    save(
        {function: convert(function, model, geometry, Schedule.FUSED, CoreMLOptions())},
        out,
        function,
    )
    return Package.open(out), {
        function: functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)[function]
    }


def named_like_ours(program: ExportedProgram) -> ExportedProgram:
    """A program whose operators have the contract's names, as far as it has so many."""
    given = {spec.arg.name for spec in program.graph_signature.output_specs}
    calls = [
        node
        for node in program.graph.nodes
        if node.op == "call_function" and node.name not in given
    ]
    for node, name in zip(calls, NAMES, strict=False):
        node.name = name
    return program


class Sums(nn.Module):
    """As many operators as there are names, between inputs, outputs and a state."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for _ in NAMES:
            x = x + y
        self.keys.copy_(x)
        return x * 2, x * 3


def test_names_of_a_program_are_free_for_its_signature() -> None:
    x = torch.ones(2)
    program = named_like_ours(functional(torch.export.export(Sums(), (x, x))))
    name_inputs(program, [CHUNK, ROOT])
    made = to_program(
        program, [ct.TensorType(name=name) for name in (TOKENS, COUNT)], Deployment.IOS18
    )
    (function,) = made.functions.values()
    assert {KEYS, CHUNK, ROOT} == set(function.inputs)
    assert [output.name for output in function.outputs] == [TOKENS, COUNT]


@pytest.mark.slow
@pytest.mark.parametrize("function", [STEP, PREFILL])
def test_operators_of_any_name(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        conversion, "functional", lambda program: named_like_ours(functional(program))
    )
    package, specs = converted("llama", function, tmp_path / "model.mlpackage")
    check_package(package, specs, {function: function})


@pytest.mark.slow
def test_layers_that_call_chunk(tmp_path: Path) -> None:
    package, specs = converted("phi3", PREFILL, tmp_path / "model.mlpackage")
    check_package(package, specs, {PREFILL: PREFILL})
