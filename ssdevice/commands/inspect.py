"""``ssdevice inspect``: what is in a bundle, and how large it is."""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssdevice import contract
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import Manifest
from ssdevice.commands.shown import show
from ssdevice.config import to_json
from ssdevice.errors import ConfigError, needs_extra
from ssdevice.runtime import phrases
from ssdevice.runtime.target import runtime_target
from ssdevice.text.chat_template import ChatTemplate
from ssdevice.text.tokenizer import TOKENIZER_ROLE
from ssdevice.text.tools import ToolStyle

TOOLS = "tools"
"""What a chat template calls them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="bundle folder")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print what the manifest says, what a session can do with the bundle, and the target's own
    facts.
    """
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

    apps = []
    for app in manifest.apps:
        size = sum(manifest.files[path].size for path in app.files)
        facts = told(app, "name", "kind", "mode", "rank", "instruction")
        apps.append({**facts, "default": app.name == manifest.default_app, "bytes": size})
    return {
        "bundle": str(bundle.folder),
        **told(manifest, "target", "precision"),
        "model": told(
            manifest.model, "model_type", "parameters", "layers", "hidden_size", "vocab", "sha256"
        ),
        **told(manifest, "mode", "schedule", "msa_layers"),
        **abilities(manifest),
        **told(geometry, "gamma", "k", "tree", "context", "chunk"),
        "tree_size": geometry.tree.size,
        "functions": [spec.name for spec in manifest.functions],
        "apps": apps,
        "stop_ids": list(manifest.chat.stop_ids),
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "bytes": manifest.total_bytes,
        "memory": memory(manifest),
        **told(manifest, "calibrated_rows", "sampling", "parity", "notes", "tools"),
    }


def abilities(manifest: Manifest) -> dict[str, Any]:
    """What a session can do with a bundle.

    ``drafts``: what they come from. ``samples``: the host chooses tokens, also by structure.
    ``reads_tools``: the chat template takes them. ``reads_calls``: their calls are found in
    answers.
    """
    chat = manifest.chat
    reads_tools = False
    if chat.template is not None:
        with suppress(ConfigError):  # whoever renders a template that is not valid says so
            reads_tools = TOOLS in ChatTemplate(chat).names
    return {
        "drafts": drafts(manifest),
        "samples": contract.VERIFY_PLAIN in [spec.name for spec in manifest.functions],
        "reads_tools": reads_tools,
        "reads_calls": reads_tools and ToolStyle.of(chat.template) is not None,
    }


def abilities_line(manifest: Manifest) -> str:
    """``abilities`` as a sentence for readers."""
    can = abilities(manifest)
    return (
        f"drafts from {can['drafts']}; "
        f"{'samples' if can['samples'] else 'chooses the likeliest token only'}; "
        f"{'reads tools' if can['reads_tools'] else 'reads no tools'}"
    )


def drafts(manifest: Manifest) -> str:
    """What drafts come from; apps without streams beside others decode plainly."""
    if manifest.mode is not None:
        own = manifest.geometry.layers > manifest.model.layers
        return "draft layers" if own else "streams"
    if not manifest.geometry.gamma:
        return "nothing"
    return "the text and phrases" if phrases.ROLE in manifest.roles else "the text"


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
