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
from ssdevice.runtime.executorch.description import describe_program
from ssdevice.runtime.executorch.engine import PROGRAM
from tests.export.executorch import programs

PORTABLE: Any = pytest.importorskip("executorch.extension.pybindings.portable_lib")


@pytest.fixture(scope="module")
def file() -> Path:
    return programs.bundle().file(PROGRAM)


def test_every_function_is_read_with_what_it_calls(file: Path) -> None:
    found = describe_program(file)
    assert set(found) == set(FUNCTIONS)  # constants take no inputs
    for calls in found.values():
        runs = calls["portable_runs"]
        assert len(runs) == len(calls["delegates"]) + 1
        assert calls["portable_calls"] == sum(calls["kernels"].values()) == sum(runs)
        assert calls["breaks"] == sum(run > 0 for run in runs[1:-1])
        assert all(one["backend"] == "XnnpackBackend" and one["operators"] for one in calls["delegates"])
        layers = programs.bundle().geometry.layers
        assert calls["kernels"]["aten::index_put_"] == 2 * layers  # keys and values of each layer are written in place


def test_kernels_are_those_the_runtime_has(file: Path) -> None:
    known = set(PORTABLE._get_operator_names())
    assert all(set(calls["kernels"]) <= known for calls in describe_program(file).values())


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
        describe_program(cut)
    assert "\n" not in str(found.value)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        describe_program(tmp_path / "model.pte")


def test_damage_ends_in_an_answer_or_in_a_bundle_error(file: Path, tmp_path: Path) -> None:
    data, chance, refused = file.read_bytes(), random.Random(0), 0
    head = 4096
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 8)):
            changed[chance.randrange(head)] = chance.randrange(256)
        target = tmp_path / "model.pte"
        target.write_bytes(changed)
        try:
            describe_program(target)
        except BundleError:
            refused += 1
    assert refused > 0


def test_inspect_shows_delegates_and_what_stands_outside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(programs.bundle().folder)]) == 0
    out = capsys.readouterr().out
    assert "XnnpackBackend" in out and "outside in step_plain: " in out and "index_put_ 4" in out
