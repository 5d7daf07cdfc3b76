"""A bundle opens only if its folder holds exactly what its manifest says; whatever is wrong is
named in one line.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdevice import contract
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import AdapterKind, App
from ssdevice.config import Mode
from ssdevice.contract import CacheForm
from ssdevice.errors import BundleError, InputError
from tests.bundle.samples import BASE, CONTENT, TREE, edit_manifest, sample_manifest, write_sample


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle nobody changes."""
    return write_sample(tmp_path_factory.mktemp("written") / "bundle").folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of the bundle to be changed."""
    return Path(shutil.copytree(written, tmp_path / "bundle"))


def refused(folder: Path, **options: Any) -> str:
    """The one line with which a bundle is refused."""
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, **options)
    text = str(caught.value)
    assert "\n" not in text and text.isprintable() and len(text) < 600
    return text


def test_an_opened_bundle_gives_what_was_written(written: Path) -> None:
    bundle = Bundle.open(written)
    written_files = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}
    assert {name: entry.sha256 for name, entry in bundle.manifest.files.items()} == written_files
    assert bundle.geometry.tree == TREE
    assert bundle.functions == contract.functions(bundle.geometry, CacheForm.EXTERNAL, "float32")
    assert bundle.manifest.chat == sample_manifest().chat
    assert bundle.file("model").read_bytes() == bundle.file("model.onnx").read_bytes() == b"a graph"
    assert (bundle.file("package") / "Manifest.json").is_file()
    assert bundle.app().name == "sql" and bundle.app("base").mode is None
    with pytest.raises(InputError, match="no app 'chat'; it has base, sql"):
        bundle.app("chat")
    with pytest.raises(
        BundleError, match="no file 'weights'; its roles are adapter:sql, model, package, tokenizer"
    ):
        bundle.file("weights")


@pytest.mark.parametrize(
    ("kind", "mode", "rank", "as_base"),
    [
        (AdapterKind.BASE, None, 0, True),
        (AdapterKind.MERGED, Mode.LOSSLESS, 0, True),
        (AdapterKind.MERGED, Mode.LOSSLESS, 8, False),
        (AdapterKind.MERGED, Mode.SHARED, 0, False),
        (AdapterKind.SLOT, None, 8, False),
    ],
)
def test_which_apps_answer_as_the_base(
    kind: AdapterKind, mode: Mode | None, rank: int, as_base: bool
) -> None:
    """Lossless streams over a LoRA change no answer of the tuned model, but the LoRA does."""
    assert (
        App("app", kind, BASE, mode=mode, rank=rank, files=("adapters/app/a",)).answers_as_base
        is as_base
    )


def test_permissions_do_not_depend_on_the_writer(written: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert written.stat().st_mode == (tmp_path / "plain").stat().st_mode


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def link(file: Path, to: str) -> None:
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    file.symlink_to(to)


FOLDER_CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "damaged": (lambda f: damage(f / "model.onnx.data"), "model.onnx.data is damaged: its sha256"),
    "longer": (
        lambda f: grow(f / "tokenizer.json"),
        "'tokenizer.json' has 3 bytes, manifest.json says 2",
    ),
    "missing": (lambda f: (f / "model.onnx").unlink(), "'model.onnx' is missing"),
    "folder missing": (
        lambda f: shutil.rmtree(f / "adapters"),
        "'adapters/sql/weights.bin' is missing",
    ),
    "extra": (lambda f: (f / "model.onnx.bak").write_bytes(b""), "'model.onnx.bak' is not listed"),
    "extra below": (
        lambda f: (f / "adapters/sql/.DS_Store").write_bytes(b""),
        "'adapters/sql/.DS_Store' is not listed",
    ),
    "ugly name": (lambda f: (f / "a\n\x1b[2Jb").write_bytes(b""), "is not listed"),
    "link out": (
        lambda f: link(f / "model.onnx", "/etc/passwd"),
        "'model.onnx' is a symbolic link",
    ),
    "link inside": (
        lambda f: link(f / "model.onnx", "tokenizer.json"),
        "'model.onnx' is a symbolic link",
    ),
    "linked folder": (lambda f: link(f / "adapters", "/tmp"), "'adapters' is a symbolic link"),
    "linked manifest": (
        lambda f: link(f / "manifest.json", "tokenizer.json"),
        "manifest.json: cannot be read",
    ),
    "pipe": (lambda f: os.mkfifo(f / "pipe"), "'pipe' is not a plain file"),
    "no manifest": (
        lambda f: (f / "manifest.json").unlink(),
        "is not a bundle: it has no manifest.json",
    ),
    "deep": (lambda f: (f / "/".join("d" * 20)).mkdir(parents=True), "nested too deeply"),
}


@pytest.mark.parametrize("name", FOLDER_CHANGES)
def test_a_changed_folder_is_refused(folder: Path, name: str) -> None:
    change, message = FOLDER_CHANGES[name]
    change(folder)
    assert message in refused(folder)


def test_without_verify_only_the_hashes_are_left_out(folder: Path) -> None:
    damage(folder / "model.onnx.data")
    Bundle.open(folder, verify=False)
    grow(folder / "model.onnx.data")
    assert "has 5121 bytes, manifest.json says 5120" in refused(folder, verify=False)


def test_a_manifest_that_is_a_pipe_is_refused_without_waiting(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert "not a plain file" in refused(folder)


def test_what_is_no_bundle_is_named(tmp_path: Path) -> None:
    assert "no such bundle" in refused(tmp_path / "absent")
    packed = tmp_path / "bundle.zip"
    packed.write_bytes(b"")
    assert "a bundle is a folder; unpack it first" in refused(packed)


MANIFEST_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "newer": (
        {"schema_version": 2},
        "made by a newer ssdevice: schema 2, this one reads 1; update ssdevice",
    ),
    "no version": ({"schema_version": None}, "'schema_version' is missing"),
    "old version": ({"schema_version": 0}, "schema_version is 0, expected 1 to 1"),
    "unknown key": ({"gama": 3}, "unknown key 'gama'"),
    "target": ({"target": "tpu"}, "'tpu' is not one of onnx, coreml, executorch"),
    "layers": ({"model|layers": 3}, "model.layers is 3, geometry.layers 2"),
    "huge layers": ({"geometry|layers": 10**9}, "layers is 1000000000, expected 1 to 1024"),
    "huge context": ({"geometry|context": 1 << 21}, "context is 2097152"),
    "huge number": ({"geometry|vocab": 10**4000}, "vocab is 1000"),
    "deep tree": (
        {"geometry|tree": [[0]] * 300},
        "geometry.tree: a draft tree has at most 256 nodes, this one has",
    ),
    "unordered tree": ({"geometry|tree": [[1], [0]]}, "breadth-first"),
    "repeated path": ({"geometry|tree": [[0], [0]]}, "appears twice"),
    "other shape": (
        {"functions|0|inputs|1|shape": [4, 2]},
        "step.inputs[1] is 'drafts' 'int32' [4, 2]",
    ),
    "other name": ({"functions|2|name": "run"}, "expected some of step, prefill, step_plain"),
    "no streams": ({"mode": None, "msa_layers": 0}, "'mode' is missing"),
    "too many MSA layers": ({"msa_layers": 2}, "msa_layers is 2, the model has 2 layers"),
    "foreign base": ({"apps|1|base_sha256": "0" * 64}, "app 'sql' is for another base"),
    "app twice": ({"apps|0|name": "SQL"}, "app 'sql' appears twice"),
    "no such default": (
        {"default_app": "chat"},
        "default_app 'chat' is not one of the apps base, sql",
    ),
    "app's file": ({"apps|1|files": ["b"]}, "app 'sql': 'b' is not in files"),
    "app's folder": ({"apps|1|folder": "adapters/other"}, "no file in its folder 'adapters/other'"),
    "app's mode": (
        {"apps|1|kind": "merged", "apps|1|mode": "lossless"},
        "app 'sql' has mode lossless, the bundle has shared",
    ),
    "half a step": (
        {"apps|1|functions": {"verify": "v"}},
        "app 'sql': verify: verify and draft need each other",
    ),
    "role": ({"roles|model": "other.onnx"}, "roles['model']: 'other.onnx' is not in files"),
    "not a hash": ({"files|model.onnx|sha256": "0" * 63}, "sha256 is '000"),
    "negative size": ({"files|model.onnx|size": -1}, "size is -1"),
    "no files": ({"files": {}}, "files: the bundle lists none"),
    "nothing finite": ({"parity|logits": float("nan")}, "not JSON this tool can use"),
    "deep": ({"chat|variables|x": json.loads("[" * 40 + "]" * 40)}, "nested deeper than 32 levels"),
    "half a character": ({"chat|template": "\ud800"}, "half a surrogate pair"),
    "line break": ({"default_app": "a\nb"}, "default_app is 'a\\nb'"),
}


@pytest.mark.parametrize("name", MANIFEST_CHANGES)
def test_a_manifest_that_does_not_hold_together_is_refused(folder: Path, name: str) -> None:
    changes, message = MANIFEST_CHANGES[name]
    edit_manifest(folder, changes)
    text = refused(folder)
    assert message in text and "manifest.json" in text


BAD_PATHS = (
    "../model.onnx",
    "a/../../b",
    "/etc/passwd",
    "C:/x",
    "a\\b",
    "a//b",
    "./a",
    "a/.",
    "",
    "a/",
    "a\0b",
    "é",
    "a b",
    ".hidden",
    "x" * 300,
    "/".join("a" * 20),
    "con",
    "a/NUL.txt",
    "a.",
    "manifest.json",
    "Manifest.JSON",
    "MODEL.onnx",
    "model.onnx/x",
    "ADAPTERS/other/x",
)


@pytest.mark.parametrize("path", BAD_PATHS)
def test_unsafe_and_colliding_names_are_refused_before_the_folder_is_read(
    folder: Path, path: str
) -> None:
    edit_manifest(folder, {f"files|{path}": {"size": 0, "sha256": BASE}})
    text = refused(folder)
    assert "manifest.json: " in text and "files" in text and "is missing" not in text


def test_bytes_that_are_no_manifest_are_refused(folder: Path) -> None:
    file = folder / "manifest.json"
    good = file.read_bytes()
    twice = good.replace(b'"target"', b'"target": "onnx", "target"', 1)
    for data, message in (
        (b"", "not JSON (line 1"),
        (b"[]", "not a JSON object"),
        (good[:-5], "not JSON"),
        (twice, "key 'target' appears twice"),
        (b"\xff" + good, "not UTF-8 text (byte 0)"),
        (b"[" * 100_000, "nested deeper than 32 levels"),
        (b'{"a": "' + b"[" * 100 + b'"}', "'schema_version' is missing"),
        (b" " * (5 << 20), "5242880 bytes, at most 4194304"),
        (b'{"schema_version": ' + b"9" * 5000 + b"}", "not JSON this tool can use"),
    ):
        file.write_bytes(data)
        assert message in refused(folder)
