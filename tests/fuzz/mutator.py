"""Seeded changes to bundles and adapters, and what may come of each.

``change`` puts a changed copy of one of four subjects at ``place`` and returns a Case. The same
seed, index and subject give the same bytes. Subjects: a bundle ``folder``, the same ``signed`` (its
signature is then required), a bundle of two apps whose weights are ``slots``, and an ``adapter``
folder on an untouched base.

What may come of a case, its *oracle*, in all of which a refusal (one line, exit code 2) is right:

``same``   only the tokens of the untouched subject. For contents whose hashes were left as they
were, for all of a
           signed bundle, and for fields of the manifest that nothing is computed from.
``any``    any tokens. Where hashes were made again after contents changed, or the manifest says
something else about
           how to decode, the bundle is another bundle: it may say other things, it may not break
           anything.
``refuse`` no tokens. For weights that are not finite numbers in adapters.

Never right: a traceback, more than one line, another exit code, a hang, the end of the process,
memory above the bound.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import adapters, files, json_values, templates
from tests.fuzz.graphs import mutate_graph

MANIFEST = "manifest.json"
SLOTS = "slots.json"
INERT = ("tools", "notes", "parity")


class Subject(StrEnum):
    """What is changed."""

    FOLDER = "folder"
    SIGNED = "signed"
    SLOTS = "slots"
    ADAPTER = "adapter"


class Oracle(StrEnum):
    """What may come of it, beside a refusal."""

    SAME = "same"
    ANY = "any"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Case:
    """A change: how to decode (``plain`` or with drafts), what may come of it, and what was done,
    for the reader.
    """

    subject: Subject
    oracle: Oracle
    plain: bool
    done: str


def change(seed: int, index: int, subject: Subject, pristine: Path, place: Path) -> Case:
    """Put case ``index`` at ``place`` (a new folder). ``pristine``: as made by pristine.py."""
    rng = Random(f"{seed}/{index}/{subject}")
    place.mkdir()
    if subject is Subject.ADAPTER:
        shutil.copytree(pristine / "adapter", place / "adapter")
        done, finite = adapters.mutate_adapter(rng, place / "adapter")
        return Case(subject, Oracle.ANY if finite else Oracle.REFUSE, False, done)
    folder = place / "bundle"
    source = {Subject.SIGNED: "signed", Subject.SLOTS: "slots"}.get(subject, "bundle")
    shutil.copytree(pristine / source, folder)
    oracle, done = change_folder(rng, folder)
    if subject is Subject.SIGNED:
        oracle = Oracle.SAME
    plain = "step_plain" in done or rng.random() < 0.2
    return Case(subject, oracle, plain, done)


def change_folder(rng: Random, folder: Path) -> tuple[Oracle, str]:
    kind = rng.choices(
        ["manifest", "geometry", "contents", "names", "tokenizer", "graph", "chat"],
        [5, 2, 5, 3, 2, 5, 2],
    )[0]
    if kind == "manifest":
        inert = rng.random() < 0.2
        document = json.loads((folder / MANIFEST).read_text("utf-8"))
        data, done = json_values.mutate(rng, document, INERT if inert else ())
        (folder / MANIFEST).write_bytes(data)
        return (Oracle.SAME if inert else Oracle.ANY), done
    if kind in ("geometry", "chat"):
        document = json.loads((folder / MANIFEST).read_text("utf-8"))
        done = (
            change_geometry(rng, document)
            if kind == "geometry"
            else templates.mutate_chat(rng, document)
        )
        (folder / MANIFEST).write_text(json.dumps(document), "utf-8")
        return Oracle.ANY, done
    if kind == "tokenizer":
        file = folder / rng.choice(
            [name for name in ("tokenizer.json", SLOTS) if (folder / name).is_file()]
        )
        data, done = json_values.mutate(rng, json.loads(file.read_text("utf-8")))
        file.write_bytes(data)
        done = f"{file.name}: {done}"
    elif kind == "graph":
        file = rng.choice(sorted(folder.glob("*.onnx")))
        done = f"{file.name}: {mutate_graph(rng, file)}"
    elif kind == "contents":
        file = rng.choice(files.listed(folder))
        changes = [*files.CONTENT, *([files.extreme_floats] * 3 if file.suffix == ".bin" else [])]
        done = rng.choice(changes)(rng, file)
    else:
        done = rng.choice(files.FOLDER)(rng, folder)
    touched = MANIFEST in done or "Manifest" in done
    if rng.random() < 0.5 or kind == "graph":
        return (
            (Oracle.ANY, f"{done}, hashed again")
            if rehash(folder)
            else (Oracle.ANY, f"{done}, manifest lost")
        )
    return (Oracle.ANY if touched else Oracle.SAME), done


def rehash(folder: Path) -> bool:
    """Make sizes and hashes of the manifest true again, for whatever files there are; False if it
    is no manifest.
    """
    if not (folder / MANIFEST).is_file():
        return False
    try:
        document = json.loads((folder / MANIFEST).read_text("utf-8"))
        document["files"] = {
            path.relative_to(folder).as_posix(): {
                "size": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in files.listed(folder)
            if path.name not in (MANIFEST, f"{MANIFEST}.sig")
        }
        (folder / MANIFEST).write_text(json.dumps(document), "utf-8")
    except (OSError, ValueError, TypeError):
        return False
    return True


def change_geometry(rng: Random, document: dict[str, Any]) -> str:
    """Other sizes, with the functions made to agree: only the graphs can contradict them."""
    from ssdevice.config import to_json
    from ssdevice.contract import CacheForm, Geometry, functions
    from ssdevice.errors import ConfigError
    from ssdevice.tree import Tree

    values = document["geometry"]
    names = rng.sample(
        ["layers", "kv_heads", "head_dim", "vocab", "gamma", "k", "context", "chunk", "tree"],
        rng.choice([1, 1, 2]),
    )
    for name in names:
        if name == "tree":
            values["tree"] = rng.choice(
                [[], [[0]], [[0], [0, 0]], [[i] for i in range(rng.choice([2, 255]))]]
            )
        else:
            values[name] = rng.choice(
                [1, 2, 3, 4, 16, 31, 32, 256, 1024, 4096, 8192, 65536, 1 << 20, 1 << 24]
            )
    for name in ("layers", "vocab"):
        document["model"][name] = values[name]
    if "gamma" in names and rng.random() < 0.3:
        values["gamma"] = 0
        values["tree"] = []
        document["msa_layers"] = 0
        document["mode"] = None
    try:
        geometry = Geometry(**{**values, "tree": Tree(((), *map(tuple, values["tree"])))})
        if values["layers"] > 4096:
            return f"geometry layers={values['layers']}"  # too many tensors to write down
        specs = functions(geometry, CacheForm(document["cache"]), document["cache_dtype"])
        had = [spec["name"] for spec in document["functions"]]
        document["functions"] = [
            to_json(specs[name]) for name in had if values["gamma"] or name != "step"
        ]
    except (ConfigError, MemoryError):
        pass  # refused before the functions are looked at
    return f"geometry {', '.join(f'{name}={str(values[name])[:20]}' for name in names)}"
