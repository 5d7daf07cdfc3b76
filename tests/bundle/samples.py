"""A small bundle for tests: made-up files behind a manifest that uses every field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.manifest import (
    AdapterKind,
    App,
    CacheDtype,
    FileEntry,
    Manifest,
    ModelIdentity,
    Precision,
    encode_manifest,
)
from ssdevice.config import Mode, Schedule
from ssdevice.contract import CacheForm, Geometry, functions
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.frames import Frame, Frames, Trim
from ssdevice.tree import Tree

BASE = "ab" * 32
CONTENT = {
    "model.onnx": b"a graph",
    "model.onnx.data": bytes(range(256)) * 20,
    "tokenizer.json": b"{}",
    "adapters/sql/weights.bin": b"slot",
    "model.mlpackage/Manifest.json": b"{}",
    "model.mlpackage/Data/weight.bin": b"",
}
ROLES = {
    "model.onnx": "model",
    "tokenizer.json": "tokenizer",
    "adapters/sql/weights.bin": "adapter:sql",
}
FOLDER = "model.mlpackage"
FOLDER_ROLE = "package"
TREE = Tree.parse("full:k=2,depth=2")


FRAMES = Frames(
    first=Frame("<s><user>", "</s>", Trim.BOTH),
    system=Frame("<s><system>", "</s>"),
    after_system=Frame("<user>", "</s>", Trim.RIGHT),
    user=Frame("<user>", "</s>", Trim.LEFT),
    assistant=Frame("<assistant>", "</s>", Trim.SPACE),
    answer="<assistant>",
    empty_system=False,
)


def sample_manifest(note: str = "the embedding is kept in fp32") -> Manifest:
    """A manifest as an exporter makes it: without files and roles."""
    geometry = Geometry(
        layers=2, kv_heads=2, head_dim=8, vocab=512, gamma=3, k=2, tree=TREE, context=64, chunk=16
    )
    return Manifest(
        tools={"ssdevice": "0.1.0", "onnxruntime": "1.31.1"},
        model=ModelIdentity(
            "llama", parameters=7_000_000, layers=2, hidden_size=64, vocab=512, sha256=BASE
        ),
        target="onnx",
        precision=Precision.INT8,
        mode=Mode.SHARED,
        schedule=Schedule.DEFERRED,
        cache=CacheForm.EXTERNAL,
        cache_dtype=CacheDtype.FP32,
        geometry=geometry,
        msa_layers=1,
        functions=tuple(functions(geometry, CacheForm.EXTERNAL, "float32").values()),
        chat=ChatFormat(
            "{{ messages[0].content }}",
            {"bos_token": "<s>", "eos_token": "</s>"},
            (2, 7),
            {"deep": [1.5]},
            FRAMES,
        ),
        apps=(
            App("base", AdapterKind.BASE, BASE),
            App(
                "sql",
                AdapterKind.SLOT,
                BASE,
                mode=Mode.SHARED,
                instruction="Answer in SQL. 你好",
                rank=8,
                folder="adapters/sql",
                files=("adapters/sql/weights.bin",),
                functions={"step": "step_sql"},
            ),
        ),
        default_app="sql",
        notes=(note,),
        parity={"logits": 1e-6},
    )


def sample_document() -> dict[str, Any]:
    """The same as plain JSON values, with files and roles (of contents that exist nowhere)."""
    document: dict[str, Any] = json.loads(encode_manifest(sample_manifest()))
    document["files"] = {path: vars(FileEntry(len(data), BASE)) for path, data in CONTENT.items()}
    document["roles"] = {role: path for path, role in {**ROLES, FOLDER: FOLDER_ROLE}.items()}
    return document


def fill(writer: BundleWriter) -> None:
    """Write the files of the sample."""
    writer.declare(FOLDER, FOLDER_ROLE)
    for path, data in CONTENT.items():
        if path.startswith(f"{FOLDER}/"):
            file = writer.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        else:
            writer.add_file(path, data, ROLES.get(path))


def write_sample(out: Path, *, overwrite: bool = False, note: str = "") -> Bundle:
    """Write the sample bundle to ``out``."""
    with BundleWriter(out, overwrite=overwrite) as writer:
        fill(writer)
        return writer.commit(sample_manifest(note))


def edit_manifest(folder: Path, changes: dict[str, Any]) -> None:
    """Set values in the manifest of a bundle, by places such as ``model|layers``; None removes."""
    file = folder / "manifest.json"
    document = json.loads(file.read_text("utf-8"))
    for place, value in changes.items():
        *parents, last = place.split("|")
        parent = document
        for key in parents:
            parent = parent[int(key) if isinstance(parent, list) else key]
        if value is None:
            del parent[last]
        elif isinstance(parent, list):
            parent[int(last)] = value
        else:
            parent[last] = value
    file.write_text(json.dumps(document), "utf-8")


def leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value in a JSON document."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(place for key, item in inside for place in leaves(item, (*at, key)))]
