"""One small bundle broken in many ways, with Python's verdict on each."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from random import Random

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.manifest import AdapterKind, App, CacheDtype, Manifest
from ssdevice.contract import CacheForm, functions
from ssdevice.errors import ConfigError, SSDeviceError
from ssdevice.text.tokenizer import ChatTokenizer
from tests.bundle.samples import sample_manifest
from tests.fuzz import files, json_values
from tests.fuzz.mutator import INERT, MANIFEST, rehash

SEED = 0
COUNT = 320
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "base-7m" / "tokenizer.json"
SETTINGS = {"compute_units": "all"}
LARGEST = 1 << 20
"""Bytes of a file that is worth keeping: changes that make larger ones are left out."""


def write(place: Path) -> None:
    """Write the bundles, each below a folder with its number, and ``verdicts.json``."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    whole = place / "whole"
    _write_whole(whole)
    verdicts = [{"folder": "whole", "done": "nothing", "accepted": accepted(whole)}]
    for number in range(COUNT):
        folder = place / str(number) / "bundle"
        shutil.copytree(whole, folder)
        done = _change(Random(f"{SEED}/{number}"), folder)
        if any(file.stat().st_size > LARGEST for file in files.listed(folder)) or _other_template(
            whole, folder
        ):
            shutil.rmtree(place / str(number))
            continue
        verdicts.append({"folder": f"{number}/bundle", "done": done, "accepted": accepted(folder)})
    (place / "verdicts.json").write_text(json.dumps({"verdicts": verdicts}), "utf-8")


def accepted(folder: Path) -> bool:
    """Whether a host of Core ML may use a bundle: what the session checks before it opens an
    engine.
    """
    try:
        bundle = Bundle.open(folder)
        ChatTokenizer.from_bytes(bundle.file("tokenizer").read_bytes(), bundle.manifest.chat)
        json.loads(bundle.file("settings").read_bytes())
    except (SSDeviceError, ValueError):
        return False
    return bundle.manifest.target == "coreml" and bundle.manifest.cache is CacheForm.INTERNAL


def _write_whole(folder: Path) -> None:
    with BundleWriter(folder) as writer:
        writer.add_file("coreml.json", json.dumps(SETTINGS).encode(), "settings")
        writer.add_file("tokenizer.json", _small_tokenizer(), "tokenizer")
        writer.declare("model.mlpackage", "model")
        for name in ("Manifest.json", "Data/com.apple.CoreML/weights/weight.bin"):
            file = writer.folder / "model.mlpackage" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(200))
        writer.commit(_manifest())


def _manifest() -> Manifest:
    sample = sample_manifest()
    geometry = dataclasses.replace(sample.geometry, hidden=sample.model.hidden_size)
    specs = functions(geometry, CacheForm.INTERNAL, "float16")
    apps = (
        App(
            "base",
            AdapterKind.BASE,
            sample.model.sha256,
            functions={"prefill": "p", "step_plain": "q"},
        ),
        App(
            "sql",
            AdapterKind.FUNCTION,
            sample.model.sha256,
            mode=sample.mode,
            functions={name: name for name in specs},
        ),
    )
    return dataclasses.replace(
        sample,
        target="coreml",
        cache=CacheForm.INTERNAL,
        cache_dtype=CacheDtype.FP16,
        apps=apps,
        geometry=geometry,
        functions=tuple(specs.values()),
    )


def _small_tokenizer() -> bytes:
    """The bytes of base-7m's tokenizer with its first merges."""
    document = json.loads(TOKENIZER.read_text("utf-8"))
    model = document["model"]
    merges = model["merges"][:20]
    made = {"".join(merge if isinstance(merge, list) else merge.split(" ")) for merge in merges}
    model["vocab"] = {
        token: i for token, i in model["vocab"].items() if len(token) == 1 or i < 5 or token in made
    }
    model["merges"] = merges
    return json.dumps(document).encode()


def _change(rng: Random, folder: Path) -> str:
    kind = rng.choices(
        ["manifest", "inert", "geometry", "contents", "names", "tokenizer"], [10, 2, 6, 3, 4, 2]
    )[0]
    if kind in ("manifest", "inert"):
        within = INERT if kind == "inert" else ()
        data, done = json_values.mutate(
            rng, json.loads((folder / MANIFEST).read_text("utf-8")), within
        )
        (folder / MANIFEST).write_bytes(data)
        return done
    if kind == "geometry":
        return _geometry(rng, folder / MANIFEST)
    if kind == "tokenizer":
        file = folder / "tokenizer.json"
        document = json.loads(file.read_text("utf-8"))
        model = document["model"]
        change = rng.choice(["merges", "vocab", "type", "text"])
        if change == "merges":
            model["merges"].insert(
                rng.randrange(20), rng.choice(["a", "a b c", ["a", "no such token"], ["a"], 3])
            )
        elif change == "vocab":
            model["vocab"][rng.choice("abc")] = rng.choice([-1, 1.5, None, "7"])
        elif change == "type":
            del document["model"]
        file.write_text(json.dumps(document)[: -1 if change == "text" else None], "utf-8")
        return f"tokenizer {change}, hashed again: {rehash(folder)}"
    done = (
        rng.choice(files.CONTENT)(rng, rng.choice(files.listed(folder)))
        if kind == "contents"
        else ""
    )
    return done or rng.choice(files.FOLDER)(rng, folder)


def _geometry(rng: Random, file: Path) -> str:
    """Other sizes, and functions that follow from them, if any do."""
    from ssdevice.config import to_json
    from ssdevice.contract import Geometry
    from ssdevice.tree import Tree

    document = json.loads(file.read_text("utf-8"))
    values = document["geometry"]
    name = rng.choice(
        [
            "layers",
            "kv_heads",
            "head_dim",
            "vocab",
            "gamma",
            "k",
            "context",
            "chunk",
            "hidden",
            "tree",
            "tree",
        ]
    )
    trees = (
        [],
        [[0]],
        [[0], [0]],
        [[1], [0]],
        [[0], [1], [1, 0]],
        [[0, 0]],
        [[0], [2]],
        [[-1]],
        [[0], [0, 0], [0, 0, 0]],
    )
    values[name] = (
        rng.choice(trees)
        if name == "tree"
        else rng.choice([0, 1, 2, 3, 7, 8, 31, 512, 8192, 1 << 20])
    )
    document["model"] |= {key: values[key] for key in ("layers", "vocab")}
    try:
        geometry = Geometry(**{**values, "tree": Tree(((), *map(tuple, values["tree"])))})
        document["functions"] = to_json(
            tuple(functions(geometry, CacheForm.INTERNAL, "float16").values())
        )
    except ConfigError:
        pass
    file.write_text(json.dumps(document), "utf-8")
    return f"geometry {name}={values[name]}"


def _other_template(whole: Path, folder: Path) -> bool:
    """Whether the chat template is another one.

    Hosts that do not render templates cannot judge them.
    """
    try:
        one, other = (
            json.loads((at / MANIFEST).read_bytes())["chat"]["template"] for at in (whole, folder)
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(one != other)
