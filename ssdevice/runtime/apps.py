"""Adds an app to a bundle with slots.

Its adapter is checked, written in the target's form, and listed in the manifest.
"""

import dataclasses
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ssdevice import arguments
from ssdevice.adapters.slots import LAYOUT_ROLE, Variant, read_layout
from ssdevice.adapters.storage import ADAPTERS, stored
from ssdevice.adapters.weights import AdapterWeights, fill
from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.integrity import SIGNATURE_FILE
from ssdevice.bundle.manifest import NAME, AdapterKind, Precision
from ssdevice.errors import InputError
from ssdevice.rules import check_rule
from ssdevice.runtime.opened import tokenizer_of
from ssdevice.runtime.target import runtime_target
from ssdevice.text.tokenizer import check_instruction


def add_app(bundle: Bundle, name: str, folder: Path, precision: Precision = Precision.FP32) -> str:
    """Add the adapter in ``folder`` to a bundle as app ``name``.

    Neither torch nor the base's folder is needed. The bundle is written to a new folder and
    replaced at once. ``precision``: how the adapter's floats are stored. Returns a sentence for the
    user. Raises InputError for an adapter that does not fit.
    """
    manifest = bundle.manifest
    check_rule("an app's name", arguments.text("an app's name", name), NAME)
    folder = arguments.path("an adapter's folder", folder)
    if name.lower() in {app.name.lower() for app in manifest.apps}:
        raise InputError(
            f"{bundle.folder} has an app {name!r}; remove it first: ssdevice bundle remove-app"
        )
    file, write = runtime_target(manifest.target).app_file(bundle, name, folder)
    weights, variant, tensors = _fitted(bundle, name, folder)
    check_instruction(tokenizer_of(bundle), name, weights.instruction, bundle.geometry.context)
    own = f"{ADAPTERS}/{name}"
    app = weights.entry(
        name,
        manifest.model.sha256,
        AdapterKind.SLOT,
        folder=own,
        files=(f"{own}/{file}",),
        functions=dict(variant.functions),
    )
    again = signature_lost(bundle)
    with BundleWriter(bundle.folder, overwrite=True) as writer:
        writer.add_bundle(bundle)
        write(writer.path_for(app.files[0]), stored(tensors, precision))
        written = writer.commit(
            dataclasses.replace(manifest, apps=(*manifest.apps, app), files={}, roles={})
        )
    entry = written.manifest.files[app.files[0]]
    return f"added app {name} to {bundle.folder} ({entry.size} bytes, {variant.described}){again}"


def signature_lost(bundle: Bundle) -> str:
    """What to say of a bundle that is written anew, if it is signed."""
    if not (bundle.folder / SIGNATURE_FILE).exists():
        return ""
    return "; its old signature is gone: sign it again"


def _fitted(
    bundle: Bundle, name: str, folder: Path
) -> tuple[AdapterWeights, Variant, dict[str, NDArray[Any]]]:
    """The adapter in ``folder``, the bundle's variant that it needs, and its tensors for that.

    Raises InputError for a bundle without slots, or an adapter for another base, of another kind
    than the bundle's apps, or with too few streams for the tree.
    """
    if LAYOUT_ROLE not in bundle.manifest.roles:
        raise InputError(
            f"{bundle.folder} has no slot for app {name!r}: its adapter is part of the graphs; "
            f"export with slots: ssdevice export --slots --adapter {name}={folder} .."
        )
    weights = AdapterWeights.read(folder)
    deepest = bundle.geometry.gamma
    if weights.settings is not None:
        weights.settings.base.check(bundle.manifest.model, f"adapter {folder}")
        gamma = weights.settings.streams.gamma
        if gamma < deepest:
            raise InputError(
                f"{folder} has γ = {gamma} streams, "
                f"the draft tree of {bundle.folder} is {deepest} deep"
            )
    layout = read_layout(bundle.file(LAYOUT_ROLE))
    variant = layout.variant(weights.variant.name)
    if variant is None:
        known = "; ".join(each.described for each in layout.variants)
        raise InputError(
            f"{bundle.folder} has no graphs for {weights.variant.described}; it has those for "
            f"{known}. Export a bundle with this app among its own: "
            f"ssdevice export --slots --adapter {name}={folder} .."
        )
    return weights, variant, fill(weights, variant, deepest, layout.hidden)
