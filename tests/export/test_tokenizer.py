"""The tokenizer of a bundle: the model's, or the one that its adapters bring."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ssdevice.cli import main
from ssdevice.errors import ConfigError
from ssdevice.export.plan import ExportOptions, ExportPlan, make_plan
from ssdevice.export.target import exporter
from ssdevice.model.tokenizer import OTHER_FORMAT
from tests.export.models import TEMPLATE, VOCAB, write_own_tokenizer

OWN = "{{ 'a' }}" + TEMPLATE


def plan(base: Path, *adapters: Path, slots: bool = False) -> ExportPlan:
    apps = tuple((folder.name, folder) for folder in adapters)
    options = ExportOptions(
        str(base), "onnx", "fp32", Path("unused"), apps, context=96, slots=slots
    )  # type: ignore[arg-type]
    return make_plan(options, exporter(options))


@pytest.fixture
def own(plain_lora: Path, base: Path, tmp_path: Path) -> Path:
    return write_own_tokenizer(Path(shutil.copytree(plain_lora, tmp_path / "own")), base, OWN)


def test_an_adapters_own_format_is_the_bundles(base: Path, own: Path, plain_lora: Path) -> None:
    made = plan(base, own)
    opening = made.tokenizer.tokenizer.token_to_id("a")
    assert (
        made.tokenizer_folder == own
        and made.tokenizer.prompt_ids("b")[0] == opening
        and made.notes == ()
    )
    assert plan(base, plain_lora).tokenizer_folder == base
    beside = plan(base, own, slots=True)
    assert beside.tokenizer_folder == own and beside.notes == (OTHER_FORMAT,)


def test_adapters_that_disagree_are_refused_before_the_work(
    base: Path, own: Path, with_lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match="need different chat templates, and a bundle has one: export them apart"
    ):
        plan(base, own, with_lora)
    (own / "tokenizer.json").unlink()
    command = ["export", "--model", str(base), "--target", "onnx", "--context", "96", "--dry-run"]
    command += ["--out", str(tmp_path / "b"), "--adapter", f"own={own}"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert (
        "tokenizer_config.json without tokenizer.json is a part" in error and error.count("\n") == 1
    )


def test_a_tokenizer_of_another_model_is_refused(base: Path, own: Path) -> None:
    document = json.loads((own / "tokenizer.json").read_text())
    document["model"]["vocab"]["a"] = VOCAB
    (own / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(
        ConfigError, match=f"uses token 'a' with id {VOCAB}, the model has {VOCAB} tokens"
    ):
        plan(base, own)
