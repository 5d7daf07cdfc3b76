"""INT4 without data is calibrated on what the model writes, or rounded to nearest if asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.bundle.folder import Bundle  # noqa: E402
from ssdevice.cli import main  # noqa: E402
from ssdevice.export.calibration import own_text  # noqa: E402
from ssdevice.model.loading import load  # noqa: E402
from ssdevice.model.tokenizer import open_tokenizer  # noqa: E402

CONTEXT = 512
BASE = Path(__file__).resolve().parents[3] / "models" / "base-7m"


@pytest.fixture(scope="module")
def written_rows() -> list[own_text.Sample]:
    """What base-7m writes."""
    backbone = load(BASE, None, CONTEXT).model.backbone
    return own_text.written(backbone, open_tokenizer(BASE), "", CONTEXT, lambda done, of: None)


def test_a_chat_model_writes_conversations(written_rows: list[own_text.Sample]) -> None:
    """Each is a user's turn in the template's form and an answer, and no two are the same."""
    tokenizer = open_tokenizer(BASE)
    assert len(set(row.ids for row in written_rows)) == len(written_rows) == own_text.ROWS
    for row in written_rows:
        prompt = tokenizer.texts.decode(list(row.ids[: row.prompt]))
        assert prompt.startswith("<|user|>") and prompt.endswith("<|end|><|assistant|>")
        assert row.prompt < len(row.ids) <= CONTEXT


def test_rows_depend_on_the_model_only(written_rows: list[own_text.Sample]) -> None:
    backbone = load(BASE, None, CONTEXT).model.backbone
    again = own_text.written(backbone, open_tokenizer(BASE), "", CONTEXT, lambda done, of: None)
    assert again == written_rows


def test_a_base_without_a_template_goes_on_from_openings(tmp_path: Path) -> None:
    for file in BASE.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    tokenizer = open_tokenizer(tmp_path)
    backbone = load(tmp_path, None, CONTEXT).model.backbone
    rows = own_text.written(backbone, tokenizer, "", 32, lambda done, of: None)
    assert len(rows) == own_text.ROWS
    assert all(row.prompt < len(row.ids) <= 32 for row in rows)


@pytest.mark.parametrize(("given", "rows"), [([], own_text.ROWS), (["--calibrate", "none"], 0)])
def test_an_export_calibrates_unless_it_is_told_not_to(
    base: Path, tmp_path: Path, given: list[str], rows: int
) -> None:
    out = tmp_path / "bundle"
    asked = ["--model", str(base), "--target", "onnx", "--quant", "int4", "--context", "96"]
    assert main(["export", *asked, *given, "--out", str(out), "--quiet"]) == 0
    manifest = Bundle.open(out).manifest
    assert manifest.calibrated_rows == rows
    said = [note for note in manifest.notes if "calibrated" in note]
    assert said == [
        f"int4 weights of the layers were calibrated on {rows} conversations that the model wrote"
    ] * bool(rows)


def test_a_plan_says_what_weights_are_rounded_with(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", str(base), "--target", "onnx", "--context", "96", "--dry-run"]
    for more, said in (
        (["--quant", "int4"], "text that the model writes"),
        (["--quant", "int4", "--calibrate", "none"], None),
        (["--quant", "int8"], None),
    ):
        assert main(["export", *asked, *more, "--out", str(tmp_path / "b")]) == 0
        assert json.loads(capsys.readouterr().out)["calibrate"] == said


def test_none_goes_with_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["export", "--model", str(BASE), "--target", "onnx", "--quant", "int4"]
    assert main([*asked, "--calibrate", "none", "--calibrate", str(tmp_path)]) == 2
    assert "--calibrate none goes with no file" in capsys.readouterr().err
