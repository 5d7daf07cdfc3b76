"""``ssdevice inspect``: what is in a bundle, and how large it is."""

import argparse
from pathlib import Path
from typing import Any

from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import Manifest
from ssdevice.commands.shown import show
from ssdevice.config import to_json
from ssdevice.errors import needs_extra
from ssdevice.runtime.target import runtime_target
from ssdevice.text.tokenizer import TOKENIZER_ROLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="bundle folder")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    bundle = Bundle.open(args.bundle)
    target = runtime_target(bundle.manifest.target)
    with needs_extra(target.extra):
        found = {**describe(bundle), **target.describe(bundle)}
    show(found, args.json)
    return 0


def describe(bundle: Bundle) -> dict[str, Any]:
    """What bundles of all targets have, as plain values; sizes in bytes."""
    manifest = bundle.manifest
    geometry = bundle.geometry

    def told(of: object, *names: str) -> dict[str, Any]:
        return {name: to_json(getattr(of, name)) for name in names}

    return {
        "bundle": str(bundle.folder),
        **told(manifest, "target", "precision"),
        "model": told(
            manifest.model, "model_type", "parameters", "layers", "hidden_size", "vocab", "sha256"
        ),
        **told(manifest, "mode", "schedule", "msa_layers"),
        **told(geometry, "gamma", "k", "tree", "context", "chunk"),
        "tree_size": geometry.tree.size,
        "functions": [spec.name for spec in manifest.functions],
        "apps": [
            {
                **told(app, "name", "kind", "mode", "rank", "instruction"),
                "default": app.name == manifest.default_app,
                "bytes": sum(manifest.files[path].size for path in app.files),
            }
            for app in manifest.apps
        ],
        "stop_ids": list(manifest.chat.stop_ids),
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "bytes": manifest.total_bytes,
        "memory": memory(manifest),
        **told(manifest, "calibrated_rows", "sampling", "parity", "notes", "tools"),
    }


def memory(manifest: Manifest) -> dict[str, int]:
    """Estimated bytes at run time: ``weights``, one copy of the files (engines may pack more), and
    a full KV cache.
    """
    geometry = manifest.geometry
    weights = sum(
        entry.size
        for name, entry in manifest.files.items()
        if name != manifest.roles.get(TOKENIZER_ROLE)
    )
    row = geometry.token_bytes(manifest.cache_dtype)
    return {"weights": weights, "kv_cache": geometry.capacity * row, "kv_cache_per_token": row}
