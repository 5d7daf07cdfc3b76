"""Programs read from their files alone: what a method calls, and files that are no programs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

from ssdevice.cli import main
from ssdevice.contract import FUNCTIONS, PLAIN
from ssdevice.errors import BundleError
from ssdevice.runtime.executorch import program as loaded
from ssdevice.runtime.executorch.engine import PROGRAM
from ssdevice.runtime.executorch.file import has_coreml, operators_of
from tests.export.executorch import programs

PORTABLE: Any = pytest.importorskip("executorch.extension.pybindings.portable_lib")


@pytest.fixture(scope="module")
def file() -> Path:
    return programs.bundle().file(PROGRAM)


def test_kernels_are_those_the_runtime_has(file: Path) -> None:
    known = set(PORTABLE._get_operator_names())
    for function in FUNCTIONS:
        assert "aten::index_put_" in operators_of(file, function) <= known


def test_an_operator_that_is_missing_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in PORTABLE._get_operator_names() if "index_put" not in name]
    monkeypatch.setattr(PORTABLE, "_get_operator_names", lambda: names)
    message = loaded.explain(file, PLAIN, RuntimeError("loading method failed with error 0x14"))
    assert message.endswith("load its libraries first (aten::index_put_))") and "\n" not in message


@pytest.mark.parametrize("part", [0, 3, 8, 30, 0.001, 0.1, 0.5, 0.99])
def test_a_cut_file_is_refused_in_one_line(file: Path, tmp_path: Path, part: float) -> None:
    data = file.read_bytes()
    cut = tmp_path / "model.pte"
    cut.write_bytes(data[: int(part * len(data)) if isinstance(part, float) else part])
    with pytest.raises(BundleError, match="model.pte: not a whole ExecuTorch program") as found:
        has_coreml(cut)
    assert "\n" not in str(found.value)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such file"):
        has_coreml(tmp_path / "model.pte")


def test_damage_ends_in_an_answer_or_in_a_bundle_error(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    chance = random.Random(0)
    refused = 0
    head = 4096
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 8)):
            changed[chance.randrange(head)] = chance.randrange(256)
        target = tmp_path / "model.pte"
        target.write_bytes(changed)
        try:
            operators_of(target, PLAIN)
        except BundleError:
            refused += 1
    assert refused > 0


def test_inspect_shows_what_is_delegated_and_what_is_outside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", str(programs.bundle().folder)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "step_plain: " in out and " delegates, " in out and "index_put_default 4" in out
