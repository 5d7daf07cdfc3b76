"""The parity gate refuses a program that computes something else, however quietly it lowers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("executorch")

from ssdevice.config import Mode, Schedule
from ssdevice.contract import CacheForm
from ssdevice.errors import ParityError
from ssdevice.export.executorch import exporter as target
from ssdevice.export.executorch.exporter import PROGRAM_FILE, ExecutorchExporter
from ssdevice.export.exporter import FOLDED, ExportJob, TargetResult
from ssdevice.export.plan import Quant
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import StreamRowAdapter
from ssdevice.runtime.executorch.engine import CACHE_DTYPE, PROGRAM
from tests.export.executorch import programs

RESULT = TargetResult({PROGRAM: PROGRAM_FILE}, CacheForm.INTERNAL, CACHE_DTYPE)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ExportJob]:
    yield programs.job(Quant.FP32, Mode.SHARED, Schedule.DEFERRED, tmp_path / "out")


@pytest.mark.lowering
def test_gate_saw_every_count_and_small_differences(job: ExportJob) -> None:
    parity = ExecutorchExporter().gate(job, programs.bundle().folder, RESULT)
    assert parity["counts"] == job.plan.geometry.tree.emitted
    assert parity["steps"] >= job.plan.geometry.tree.size
    assert parity["rows"] < 1e-4 and parity["near_ties"] == 0


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("backbone.layers.0.self_attn.v_proj.weight", "committed rows, values of layer 0"),
        ("backbone.layers.1.mlp.down_proj.weight", "next_root|tokens|next_drafts"),
        ("streams.identifiers", "next_drafts"),
    ],
)
def test_a_program_of_other_weights_is_refused(job: ExportJob, weight: str, message: str) -> None:
    with torch.no_grad():
        value = job.loaded.model.get_parameter(weight)
        value[: len(value) // 2].mul_(-1.5).add_(1.0)
    with pytest.raises(ParityError, match=message):
        ExecutorchExporter().gate(job, programs.bundle().folder, RESULT)


@pytest.mark.slow
def test_linears_quantized_by_weight_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They computed something else, without a word, and were the reason for the gate.

    ExecuTorch refuses some.
    """
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerAxis
    from torchao.quantization.quant_api import IntxWeightOnlyConfig

    from ssdevice.export.executorch.quantization import quantized

    def by_weight(
        model: target.StreamModel, quant: Quant
    ) -> tuple[target.StreamModel, tuple[str, ...]]:
        _, notes = quantized(model, quant)
        import copy

        alone = copy.deepcopy(model)
        alone.backbone.lm_head.weight = torch.nn.Parameter(
            alone.backbone.lm_head.weight.detach().clone()
        )
        quantize_(
            alone.backbone.layers,
            IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
        )
        return alone, notes

    monkeypatch.setattr(target, "quantized", by_weight)
    job = programs.job(Quant.INT8, Mode.SHARED, Schedule.DEFERRED, tmp_path / "out")
    with pytest.raises((ParityError, RuntimeError)) as refusal:
        result = ExecutorchExporter().export(job, tmp_path)
        ExecutorchExporter().gate(job, tmp_path, result)
    assert isinstance(refusal.value, ParityError) or "Missing out variants" in str(refusal.value)


def test_most_operators_are_delegated_and_the_rest_is_named() -> None:
    notes = [note for note in programs.bundle().manifest.notes if "delegates" in note]
    assert [note.split(":")[0] for note in notes] == ["step", "prefill", "step_plain"]
    for note in notes:
        inside, outside = (
            int(part.split()[0]) for part in (note.split(": ")[1], note.split("delegates, ")[1])
        )
        assert inside > outside, note


@pytest.mark.lowering
@pytest.mark.parametrize(
    ("schedule", "folded"), [(Schedule.DEFERRED, True), (Schedule.FUSED, False)]
)
def test_stream_adapters_are_folded_where_streams_run_on_their_own(
    schedule: Schedule, folded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = programs.job(Quant.FP32, Mode.LOSSLESS, schedule, tmp_path / "out")
    seen: list[StreamModel] = []
    monkeypatch.setattr(target, "lower", lambda *_: ())
    monkeypatch.setattr(target, "check_stored", lambda _, model, *__: seen.append(model))
    notes = ExecutorchExporter().export(given, tmp_path).notes
    rows = [part for part in seen[0].modules() if isinstance(part, StreamRowAdapter)]
    assert rows and all((row.folded is not None) is folded for row in rows)
    assert (FOLDED in notes) is folded
