"""``ssdevice inspect``: what is in a bundle, and how large it is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.config import to_json
from ssdevice.errors import needs_extra
from ssdevice.runtime.target import RuntimeTarget, runtime_target

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.bundle.manifest import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice inspect BUNDLE``."""
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="bundle folder")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check the bundle and print its contents."""
    from ssdevice.bundle.folder import Bundle

    bundle = Bundle.open(args.bundle)
    target = runtime_target(bundle.manifest.target)
    with needs_extra(target.extra):
        found = {**describe(bundle), **target.describe(bundle)}
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _print(found, target)
    return 0


def describe(bundle: Bundle) -> dict[str, Any]:
    """What bundles of all targets have, as plain values; sizes in bytes."""
    manifest, geometry = bundle.manifest, bundle.geometry
    return {
        "bundle": str(bundle.folder),
        "target": manifest.target,
        "precision": manifest.precision.value,
        "model": {
            "family": manifest.model.model_type,
            "parameters": manifest.model.parameters,
            "layers": manifest.model.layers,
            "hidden_size": manifest.model.hidden_size,
            "vocab": manifest.model.vocab,
            "sha256": manifest.model.sha256,
        },
        "mode": manifest.mode.value if manifest.mode else None,
        "schedule": manifest.schedule.value,
        "gamma": geometry.gamma,
        "k": geometry.k,
        "msa_layers": manifest.msa_layers,
        "tree": geometry.tree.to_json(),
        "tree_size": geometry.tree.size,
        "context": geometry.context,
        "chunk": geometry.chunk,
        "functions": [spec.name for spec in manifest.functions],
        "apps": app_rows(manifest),
        "stop_ids": list(manifest.chat.stop_ids),
        "sampling": to_json(manifest.sampling),
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "bytes": manifest.total_bytes,
        "calibrated_rows": manifest.calibrated_rows,
        "memory": memory(manifest),
        "parity": manifest.parity,
        "notes": list(manifest.notes),
        "tools": manifest.tools,
    }


def app_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """The apps of a bundle as plain values; sizes in bytes."""
    return [
        {
            "name": app.name,
            "default": app.name == manifest.default_app,
            "kind": app.kind.value,
            "mode": app.mode.value if app.mode else None,
            "rank": app.rank,
            "instruction": app.instruction,
            "bytes": sum(manifest.files[path].size for path in app.files),
        }
        for app in manifest.apps
    ]


def memory(manifest: Manifest) -> dict[str, int]:
    """Estimated bytes at run time: ``weights``, one copy of the files (engines may pack more), and a full KV cache."""
    from ssdevice.text.tokenizer import TOKENIZER_ROLE

    geometry = manifest.geometry.geometry
    tokenizer = manifest.roles.get(TOKENIZER_ROLE)
    weights = sum(entry.size for name, entry in manifest.files.items() if name != tokenizer)
    row = geometry.token_bytes(manifest.cache_dtype)
    return {"weights": weights, "kv_cache": geometry.capacity * row, "kv_cache_per_token": row}


def _print(found: dict[str, Any], target: RuntimeTarget) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    model, table = found["model"], Table(show_header=False, box=box.SIMPLE, pad_edge=False)
    rows = {
        "bundle": f"{found['bundle']}  ({_size(found['bytes'])})",
        "target": f"{found['target']}, {found['precision']}",
        "model": f"{model['family']}, {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers, "
        f"hidden {model['hidden_size']}, vocabulary {model['vocab']}",
        "weights": f"sha256 {model['sha256']}",
        "decoding": _decoding(found),
        "tree": f"{found['tree_size']} nodes: {found['tree']}",
        "context": f"{found['context']} tokens, prefill in chunks of {found['chunk']}",
        "functions": ", ".join(found["functions"]),
        "memory": f"weights {_size(found['memory']['weights'])}, KV cache {_size(found['memory']['kv_cache'])} "
        f"({found['memory']['kv_cache_per_token']} bytes per token)",
        "made with": ", ".join(f"{name} {version}" for name, version in found["tools"].items()),
    }
    if found["parity"]:
        rows["parity"] = ", ".join(f"{name} {value:.3g}" for name, value in found["parity"].items())
    if (sampling := found["sampling"]) is not None:
        asks = "recommends sampling" if sampling["do_sample"] else "names"
        named = ", ".join(f"{name} {value}" for name, value in sampling.items() if value and name != "do_sample")
        rows["sampling"] = f"generation_config.json {asks}{': ' * bool(named)}{named[:500]} (run with --sample)"
    for i, note in enumerate(found["notes"], 1):
        rows[f"note {i}"] = note
    for name, text in rows.items():
        table.add_row(name, escape(text))
    console.print(table)
    apps = Table("app", "kind", "mode", "rank", "bytes", "instruction", box=box.SIMPLE, pad_edge=False)
    for app in found["apps"]:
        name = f"{app['name']} (default)" if app["default"] else app["name"]
        apps.add_row(
            name, app["kind"], app["mode"] or "", str(app["rank"]), _size(app["bytes"]), escape(app["instruction"])
        )
    console.print(apps)
    files = Table("file", "size", box=box.SIMPLE, pad_edge=False)
    for name, size in found["files"].items():
        files.add_row(escape(name), _size(size))
    console.print(files)
    target.print_description(console, found, _size)


def _decoding(found: dict[str, Any]) -> str:
    if found["mode"] is not None:
        sizes = f"γ = {found['gamma']}, k = {found['k']}, {found['msa_layers']} MSA layers"
        return f"{found['mode']}, {sizes}, {found['schedule']} schedule"
    return f"no streams: {found['gamma']} drafts repeat the text" if found["gamma"] else "plain: no streams"


def _size(count: int) -> str:
    """A number of bytes with a unit (MB is 10⁶ bytes)."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
