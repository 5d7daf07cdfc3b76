"""What the machine does to an export: a line on stderr, an exit code, and nothing half-made."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ssdevice.bundle.folder import BundleWriter
from ssdevice.cli import TERMINATED, main
from ssdevice.export import stages
from ssdevice.export.onnx.exporter import OnnxExporter
from tests.export.models import write_adapter

GB = 1_000_000_000


def export(base: Path, out: Path, *flags: str) -> int:
    return main(
        [
            "export",
            "--model",
            str(base),
            "--target",
            "onnx",
            "--context",
            "96",
            "--out",
            str(out),
            *flags,
        ]
    )


def ending(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """The stage of this number fails as it begins; those before it do nothing but leave a file."""

    def begin(_: stages.Whole, name: str) -> None:
        if list(stages.STAGES).index(name) == number:
            raise error

    monkeypatch.setattr(stages.Whole, "begin", begin)
    monkeypatch.setattr(stages, "check_export", lambda *_: ())
    monkeypatch.setattr(stages.ExportJob, "of", lambda *_: None)
    monkeypatch.setattr(stages, "smoothed_job", lambda job, *_: job)
    monkeypatch.setattr(stages, "calibrated_job", lambda job, *_: job)
    monkeypatch.setattr(OnnxExporter, "prepare", lambda _, job: job)
    monkeypatch.setattr(
        OnnxExporter, "export", lambda _, job, folder: (folder / "half").write_text("x")
    )


@pytest.mark.parametrize("number", range(len(stages.STAGES)))
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "ssdevice: interrupted"),
        (SystemExit(TERMINATED), 143, ""),
        (OSError(28, "No space left on device"), 1, "the disk is full"),
        (
            RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)"),
            1,
            "the disk is full",
        ),
        (
            RuntimeError("[MIL FileWriter]: Unknown error occurred while writing data."),
            1,
            "the disk is full",
        ),
        (OSError(27, "File too large", "weights.bin"), 1, "weights.bin: File too large"),
        (MemoryError(), 1, "out of memory"),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            ),
            1,
            "out of memory",
        ),
    ],
)
def test_a_failure_in_any_stage_is_a_line_and_leaves_nothing(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    ending(monkeypatch, number, error)
    try:
        assert export(base, tmp_path / "b") == code
    except SystemExit as stop:
        assert stop.code == code
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == bool(message)
    assert os.listdir(tmp_path) == []


def test_of_two_exports_to_one_place_the_second_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with BundleWriter(tmp_path / "b") as first:
        assert export(base, tmp_path / "b") == 2
        assert "another process is writing" in capsys.readouterr().err
        assert os.listdir(tmp_path) == [first.folder.name]
    assert os.listdir(tmp_path) == []


def test_an_instruction_longer_than_the_context_is_refused_before_weights_are_loaded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    settings = json.loads((adapter / "streams.json").read_text("utf-8"))
    (adapter / "streams.json").write_text(
        json.dumps({**settings, "instruction": "a b " * 50}), "utf-8"
    )
    monkeypatch.setattr(OnnxExporter, "prepare", None)
    assert export(base, tmp_path / "b", "--adapter", f"long={adapter}") == 2
    said = capsys.readouterr().err
    assert (
        "the instruction of app 'long' and the chat template take 10" in said
        and "a context of 96" in said
    )
    assert said.count("\n") == 1 and not (tmp_path / "b").exists()
