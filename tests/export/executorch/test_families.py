"""Every family's step lowers, and speculation with it commits the rows of plain decoding."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("executorch")

from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.contract import CacheForm, Geometry, functions
from ssdevice.export.executorch.lowering import constants_of, lower, partitioner, trace, traced
from ssdevice.export.executorch.speed import quick
from ssdevice.export.plan import ExportPlan, Quant
from ssdevice.model.loading import build
from ssdevice.model.step import StreamModel
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import CACHE_DTYPE, ExecutorchEngine
from ssdevice.tree import Tree
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.model.tiny import MODELS, tiny_model

TREE = Tree.of([[0], [1], [1, 0]])
CONTEXT = 24
CHUNK = 5
PROMPT = [7, 21, 3, 44, 9, 30, 12]
PROMPTS = {"opt-after": [15, 37, 32, 30, 57, 35, 18]}
"""Of families whose answer to the first is one token over and over."""


def tiny(family: str) -> tuple[StreamModel, Geometry]:
    """A model of two streams, and what an export of it would have."""
    model = build(
        tiny_model(family), StreamConfig(Mode.LOSSLESS, TREE.depth, 1, adapter_rank=4), CONTEXT
    ).eval()
    backbone = model.backbone
    geometry = Geometry(
        backbone.num_layers,
        backbone.kv_heads,
        backbone.head_dim,
        int(backbone.config.vocab_size),
        TREE.depth,
        TREE.width,
        TREE,
        CONTEXT,
        CHUNK,
    )
    return model, geometry


def windows_of(model: StreamModel) -> list[int]:
    """Of its layers, those that have one."""
    return [window for window in model.backbone.windows() if window is not None]


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_every_node_commits_the_rows_of_plain_decoding(family: str, tmp_path: Path) -> None:
    model, geometry = tiny(family)
    options = SimpleNamespace(chosen=lambda kind: kind())
    plan: Any = SimpleNamespace(geometry=geometry, schedule=Schedule.DEFERRED, options=options)
    specs = functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)
    file = tmp_path / "model.pte"
    with quick():
        programs = traced(
            specs,
            lambda name, spec: trace(name, spec, model, cast(ExportPlan, plan)),
            lambda *_: None,
        )
        lower(programs, partitioner(), constants_of(geometry, ()), file, lambda *_: None)
    windows = windows_of(model)
    with closing(ExecutorchEngine(file, geometry, list(specs), EngineOptions())) as engine:
        oracle = OracleDriver(engine, windows)
        # A window shorter than a run keeps new rows behind the cache, where sums have another
        # order.
        facts = drive(oracle, PROMPTS.get(family, PROMPT), seed=1)
        check(facts, oracle, 1e-4 if windows else 0.0, perturbation_tolerance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_core_ml_delegate_commits_the_rows_of_plain_decoding(family: str, tmp_path: Path) -> None:
    pytest.importorskip("coremltools", reason="needs the coreml extra")
    from ssdevice.export.executorch import coreml_exporter as executorch_coreml

    model, geometry = tiny(family)
    options = SimpleNamespace(quant=Quant.FP16, chosen=lambda kind: kind())
    plan: Any = SimpleNamespace(geometry=geometry, schedule=Schedule.FUSED, options=options)
    specs = functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)
    file = tmp_path / "model.pte"
    with executorch_coreml.partitioner(plan, []) as parts:
        programs = traced(
            specs,
            lambda name, spec: executorch_coreml.trace(name, spec, model, plan),
            lambda *_: None,
        )
        delegated = lower(programs, parts, constants_of(geometry, ()), file, lambda *_: None)
    writes = 2 * geometry.layers
    assert all(
        f" in 1 delegates, {writes} outside (most: index_put {writes})" in note
        for note in delegated
    )
    with closing(ExecutorchEngine(file, geometry, list(specs), EngineOptions())) as engine:
        oracle = OracleDriver(engine, windows_of(model))
        facts = drive(oracle, PROMPTS.get(family, PROMPT), seed=1)
        check(facts, oracle, 0.0, perturbation_tolerance=0.0)
