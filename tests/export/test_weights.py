"""A new kind of weight is one Kind and, where a target stores it in fewer bits, one row: every
reader finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ssdevice.config import Schedule
from ssdevice.export import weights
from ssdevice.export.calibration.calibrate import calibrate
from ssdevice.export.exporter import Exporter, ExportJob
from ssdevice.export.onnx import quantization as onnx
from ssdevice.export.parity.products import followed
from ssdevice.export.parity.reference import jittered
from ssdevice.export.plan import ExportOptions, Quant, make_plan
from ssdevice.export.weights import UNLISTED, Kind, Schemes, floats_note, stored, unlisted
from ssdevice.model.step import StreamModel
from ssdevice.text.tokenizer import Sample

EXPERTS = "experts"
QUANT = Quant.INT8


class Experts(nn.Module):
    """Two matrices in one tensor ``[2, outputs, inputs]``; a row goes through both."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        halves = torch.stack([linear.weight.detach() * 0.25, linear.weight.detach() * 0.75])
        self.stack = nn.Parameter(halves, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.matmul(x, self.stack.transpose(1, 2))
        return both[:1] + both[1:]


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only thing that a new kind of weight needs."""
    added = Kind(Experts, ("stack",), part=EXPERTS)
    monkeypatch.setattr(weights, "KINDS", (*weights.KINDS, added))


def job_with_experts(base: Path, out: Path, target: str, exporter: Exporter) -> ExportJob:
    options = ExportOptions(str(base), target, QUANT, out, context=96, chunk=16)
    job = ExportJob.of(make_plan(options, exporter), lambda *_: None)
    mlp = job.loaded.model.backbone.layers[1].mlp
    mlp.down_proj = Experts(mlp.down_proj)
    return job


@pytest.fixture
def model(base: Path, tmp_path: Path) -> StreamModel:
    from ssdevice.export.onnx.exporter import OnnxExporter

    return job_with_experts(base, tmp_path / "b", "onnx", OnnxExporter()).loaded.model


def experts(model: StreamModel) -> Experts:
    found: Experts = model.backbone.layers[1].mlp.down_proj
    return found


def tables() -> dict[str, Schemes]:
    """The tables of all targets that are installed."""
    found = {"onnx": onnx.schemes(QUANT)}
    try:
        from ssdevice.export.mlprogram import weights as mlprogram

        found["coreml"] = mlprogram.schemes(QUANT, per_channel=False)
    except ModuleNotFoundError:
        pass
    from ssdevice.export.coreai import weights as coreai
    from ssdevice.export.executorch import quantization as executorch

    return {**found, "executorch": executorch.schemes(QUANT), "coreai": coreai.schemes(QUANT)}


def test_without_a_row_it_stays_floats_and_a_note_says_so(kind: None, model: StreamModel) -> None:
    for target, schemes in tables().items():
        table = stored(model, schemes)
        (found,) = [one for one in table if one.role.part == EXPERTS]
        assert found.scheme is UNLISTED, target
        assert found.module is experts(model)
        assert found.weight is experts(model).stack
        assert found.names == ("backbone.layers.1.mlp.down_proj.stack",)
        (note,) = floats_note(unlisted(table))
        assert note.endswith("stay floats: backbone.layers.1.mlp.down_proj.stack")


def test_with_a_row_it_is_stored_as_that_says(kind: None, model: StreamModel) -> None:
    for target, schemes in tables().items():
        row = {**schemes.by_part, EXPERTS: schemes.usual}
        table = stored(model, replace(schemes, by_part=row))
        (found,) = [one for one in table if one.role.part == EXPERTS]
        assert found.scheme is schemes.usual, target
        assert not unlisted(table)


def test_no_reader_passes_it_over(kind: None, model: StreamModel) -> None:
    module = experts(model)
    before = module.stack.clone()
    x = torch.randn(1, 3, module.stack.shape[2])
    expected = module(x)
    with jittered(model, 0.1, torch.Generator().manual_seed(0)):
        assert not torch.equal(module(x), expected), "the gate's second reference rounds it too"
    assert module not in followed(model, False, Schedule.DEFERRED), "it is no product"
    rows = [Sample(tuple(range(3, 23)), 10)]
    calibrate(model, rows, Schemes(onnx.INT4), lambda _: None)
    assert torch.equal(module.stack, before), "a tensor that is no matrix has no grid"
    with onnx.simulated(model, QUANT):
        assert torch.equal(module(x), expected), "the reference stores it as the table says"


def test_modules_of_no_kind_hold_no_weights(model: StreamModel) -> None:
    """The table would miss them; here it does, since their kind is not there."""
    assert not any(one.role.part == EXPERTS for one in stored(model, onnx.schemes(QUANT)))


def onnx_exporter() -> Exporter:
    from ssdevice.export.onnx.exporter import OnnxExporter

    return OnnxExporter()


def coreml_exporter() -> Exporter:
    pytest.importorskip("coremltools", reason="needs the coreml extra")
    from ssdevice.export.coreml.exporter import CoreMLExporter

    return CoreMLExporter()


def executorch_exporter() -> Exporter:
    pytest.importorskip("executorch", reason="needs the executorch extra")
    from ssdevice.export.executorch.exporter import ExecutorchExporter

    return ExecutorchExporter()


@pytest.mark.parametrize(
    ("target", "make"),
    [
        ("onnx", onnx_exporter),
        pytest.param("coreml", coreml_exporter, marks=pytest.mark.slow),
        pytest.param("executorch", executorch_exporter, marks=pytest.mark.slow),
    ],
)
def test_a_bundle_has_it_and_passes_its_gate(
    kind: None, base: Path, tmp_path: Path, target: str, make: Callable[[], Exporter]
) -> None:
    exporter = make()
    job = job_with_experts(base, tmp_path / "out", target, exporter)
    folder = tmp_path / "files"
    folder.mkdir()
    result = exporter.export(job, folder)
    assert any("down_proj.stack" in note for note in result.notes)
    exporter.gate(job, folder, result)
