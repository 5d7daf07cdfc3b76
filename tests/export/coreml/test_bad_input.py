"""Bundles whose package is damaged or was edited, and exports that cannot be: each ends in one
line.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.manifest import AdapterKind, App, CacheDtype, Precision
from ssdevice.cli import main
from ssdevice.contract import CacheForm, functions
from ssdevice.export.coreml.apps import PROGRAM
from ssdevice.export.coreml.exporter import PACKAGE
from ssdevice.export.plan import ExportOptions, Quant
from ssdevice.export.stages import export_bundle
from ssdevice.runtime.coreml.engine import SLOW
from tests.bundle.samples import BASE, sample_manifest
from tests.export.coreml.tiny import GEOMETRY, STEP, package
from tests.runtime import tiny_bundle
from tests.runtime.scripted import make_tokenizer

pytestmark = pytest.mark.skipif(
    sys.platform == "darwin", reason="there Core ML itself opens a package"
)

WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")
Change = Callable[[Path], None]


def write_bundle(out: Path, change: Change = lambda _: None) -> Bundle:
    """A bundle around the tiny package, changed before it is hashed: what someone makes who edits
    both.
    """
    greedy = dataclasses.replace(GEOMETRY, hidden=0)
    tensors = functions(greedy, CacheForm.INTERNAL, "float16")
    sample = sample_manifest()
    manifest = dataclasses.replace(
        sample,
        model=dataclasses.replace(sample.model, layers=GEOMETRY.layers, vocab=GEOMETRY.vocab),
        target="coreml",
        precision=Precision.FP16,
        cache=CacheForm.INTERNAL,
        cache_dtype=CacheDtype.FP16,
        geometry=greedy,
        functions=tuple(tensors.values()),
        apps=(App("letters", AdapterKind.MERGED, BASE),),
        default_app="letters",
    )
    with BundleWriter(out) as writer:
        shutil.copytree(package(), writer.folder / PACKAGE)
        change(writer.folder / PACKAGE)
        writer.declare(PACKAGE, "model")
        writer.add_file("coreml.json", b"{}", "settings")
        writer.add_file("tokenizer.json", make_tokenizer().tokenizer_json, "tokenizer")
        return writer.commit(manifest)


def edited(change: Callable[[Any], None]) -> Change:
    """``change`` gets the model file as coremltools' protobuf message."""

    def apply(folder: Path) -> None:
        from coremltools.proto import Model_pb2

        model = Model_pb2.Model.FromString((folder / PROGRAM).read_bytes())
        change(model)
        (folder / PROGRAM).write_bytes(model.SerializeToString())

    return apply


def _operations(model: Any) -> Any:
    function = model.mlProgram.functions[STEP]
    return function.block_specializations[function.opset].operations


def _rename_op(model: Any) -> None:
    next(op for op in _operations(model) if op.type == "silu").type = "frobnicate"


def _rename_input(model: Any) -> None:
    first = model.mlProgram.functions[STEP].inputs[0]
    old, first.name = first.name, "begin"
    for operation in _operations(model):
        for argument in operation.inputs.values():
            for binding in argument.arguments:
                if binding.name == old:
                    binding.name = "begin"


def _age(model: Any) -> None:
    model.specificationVersion = 8


def _cut_weights(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def _append(folder: Path) -> None:
    with (folder / PROGRAM).open("ab") as file:
        file.write(b"\0")


def _flip(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)


EDITED = {
    "unknown op": (
        edited(_rename_op),
        1,
        "operation 'frobnicate' is not supported.*export the bundle again",
    ),
    "another input": (edited(_rename_input), 2, "function 'step'.*do not belong together"),
    "old deployment target": (
        edited(_age),
        2,
        "deployment target is too old.*version 8.*export again",
    ),
    "truncated weights": (_cut_weights, 2, "weight.bin.*(cut short|outside the file)"),
    "a file that is no program": (_append, 2, "model.mlmodel: not a usable model file"),
}
CHANGED = {
    "edited program": (_append, "model.mlmodel"),
    "edited weight": (_flip, "weight.bin"),
    "truncated weights": (_cut_weights, "weight.bin"),
    "missing weights": (lambda folder: (folder / WEIGHTS).unlink(), "weight.bin"),
    "one file more": (lambda folder: (folder / "Data/more.bin").write_bytes(b"1"), "more.bin"),
}
COMMANDS = {
    "run": ["--prompt", "abc", "--max-tokens", "4"],
    "verify": ["--limit", "1", "--max-tokens", "4"],
}


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What stands on stderr beside the interpreter's own notice."""
    (line,) = (text for text in capsys.readouterr().err.splitlines() if text != SLOW)
    return line


def test_the_bundle_is_sound_before_it_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_bundle(tmp_path / "bundle")
    assert main(["run", str(tmp_path / "bundle"), *COMMANDS["run"], "--quiet"]) == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", EDITED)
def test_a_package_edited_with_its_hashes_is_refused(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    change, code, message = EDITED[name]
    write_bundle(tmp_path / "bundle", change)
    assert main([command, str(tmp_path / "bundle"), *COMMANDS[command], "--quiet"]) == code
    assert re.search(message, one_line(capsys))


@pytest.mark.parametrize("name", CHANGED)
def test_a_package_that_is_not_the_manifests_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    change, file = CHANGED[name]
    folder = write_bundle(tmp_path / "bundle").folder
    change(folder / PACKAGE)
    for command, rest in COMMANDS.items():
        assert main([command, str(folder), *rest, "--quiet"]) == 2
        assert file in one_line(capsys)


@pytest.mark.parametrize("system", ["iOS17", "macOS14"])
def test_an_old_deployment_target_is_refused_before_anything_is_read(
    system: str, capsys: pytest.CaptureFixture[str]
):
    assert (
        main(["export", "--model", "nowhere", "--target", "coreml", "--deployment-target", system])
        == 2
    )
    line = one_line(capsys)
    assert f"--deployment-target {system}" in line and "iOS18 (macOS15)" in line


@pytest.mark.slow
def test_a_width_that_blocks_do_not_divide_is_in_the_manifest(tmp_path: Path):
    options = ExportOptions(
        model=str(tiny_bundle.base_folder()),
        target="coreml",
        quant=Quant.INT4,
        out=tmp_path / "bundle",
        context=tiny_bundle.CONTEXT,
        chunk=tiny_bundle.CHUNK,
    )
    notes = export_bundle(options, lambda *_: None).manifest.notes
    assert any(
        "has 48 inputs, not a multiple of 32: int8 per channel, not int4" in note for note in notes
    )
