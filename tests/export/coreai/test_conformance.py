"""Speculative output is plain output on Core AI's own runtime, for every way a step can end."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.export.coreai.bundles import ABSENT, Cell, apps, base, bundle, options

pytest.importorskip("coreai_torch", reason=ABSENT)

import torch
from torch.export import ExportedProgram

from ssdevice.config import Mode, Schedule
from ssdevice.contract import DRAFT, PREFILL
from ssdevice.errors import ParityError
from ssdevice.export.coreai import exporter as target
from ssdevice.export.coreai.exporter import ASSET, CoreAIExporter
from ssdevice.export.coreai.weights import INT8, Integers
from ssdevice.export.exporter import ExportJob, TargetResult
from ssdevice.export.plan import Quant, make_plan
from ssdevice.model.loading import load
from ssdevice.runtime.coreai.engine import CACHE_DTYPE, PROGRAM, CoreAIEngine
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.runtime.sampling.promise import SAMPLERS, check_forced_drafts

PROMPT = [7, 21, 3, 44, 9, 30, 12]
QUICK = Cell(Quant.INT4)


@pytest.mark.parametrize(
    "cell",
    [
        cell if cell == QUICK else pytest.param(cell, marks=pytest.mark.slow)
        for cell in itertools.starmap(Cell, itertools.product(CoreAIExporter.bits, Mode, Schedule))
    ],
    ids=str,
)
def test_speculative_output_is_plain_output(cell: Cell) -> None:
    exported = bundle(cell)
    assert exported.manifest.parity["counts"] == exported.geometry.tree.emitted
    assert exported.manifest.parity["products"] > 100
    engine = CoreAIEngine.of(exported, None)
    driver = OracleDriver(engine)
    check(drive(driver, PROMPT, seed=1), driver, 1e-4)
    for sampling in SAMPLERS[2:4]:
        assert check_forced_drafts(engine, sampling) == set(range(1, driver.tree.emitted + 1))
    engine.close()


def test_deviations_from_a_precision_are_noted() -> None:
    notes = " ".join(bundle(QUICK).manifest.notes)
    assert (
        "embedding and head are int8" in notes
        and "down_proj has 80 inputs, not a multiple of 32" in notes
    )
    assert "activations, products and the cache are float32" in notes


def test_a_fault_between_products_is_refused_before_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = target.trace

    def wrong(*given: Any) -> ExportedProgram:
        program = trace(*given)
        last = [node for node in program.graph.nodes if node.target is torch.ops.aten.silu.default][
            -1
        ]
        last.target = torch.ops.aten.relu.default
        return program

    monkeypatch.setattr(target, "trace", wrong)
    exporter = CoreAIExporter()
    job = ExportJob.of(make_plan(options(QUICK, tmp_path / "out"), exporter), lambda *_: None)
    with pytest.raises(ParityError, match="layer 1, mlp.down_proj reads rows"):
        exporter.export(job, tmp_path)


def test_the_gate_refuses_an_asset_of_other_weights() -> None:
    """One matrix of the reference is a hundredth larger, which four bits hide neither in codes nor
    in scales.
    """
    exported = bundle(QUICK)
    exporter = CoreAIExporter()
    job = ExportJob.of(make_plan(options(QUICK, exported.folder), exporter), lambda *_: None)
    job.loaded.model.backbone.layers[0].mlp.down_proj.weight.data *= 1.01
    result = TargetResult({}, exported.manifest.cache, CACHE_DTYPE)
    with pytest.raises(ParityError, match="committed rows"):
        exporter.gate(job, exported.folder, result)


@pytest.mark.slow
def test_apps_are_functions_over_one_base() -> None:
    """The embedding, which is also the head, is stored once, and each app passed the gate with its
    own streams.
    """
    exported = apps()
    codes, _ = Integers(INT8).right_inverse(
        load(base(), None, 24).model.backbone.embed_tokens.weight
    )
    assert (exported.folder / ASSET / PROGRAM).read_bytes().count(codes.numpy().tobytes()) == 1
    for name in ("one", "other"):
        engine = CoreAIEngine.of(exported, name)
        assert (engine.names[PREFILL], engine.names[DRAFT]) == (f"prefill_{name}", f"draft_{name}")
        driver = OracleDriver(engine)
        check(drive(driver, PROMPT, seed=1), driver, 1e-4)
        engine.close()


def test_logits_decide_the_tokens() -> None:
    engine = CoreAIEngine.of(bundle(QUICK), None)
    engine.shows_logits = True
    conversation = engine.new_conversation()
    last = conversation.prefill(PROMPT[:5])
    conversation.length = 5
    assert conversation.step(last) == conversation.logits.argmax(-1).tolist()
    assert conversation.logits.shape[1] == engine.geometry.vocab
    engine.close()
