"""A new app for a bundle whose base has slots: its adapter is checked, written in the target's form, and listed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ssdevice.adapter_settings import BaseIdentity
from ssdevice.bundle import OWN_FILES, Bundle, BundleWriter
from ssdevice.config import Target
from ssdevice.errors import InputError
from ssdevice.integrity import check_rule
from ssdevice.manifest import NAME, AdapterKind, App
from ssdevice.slot_weights import AdapterWeights, fill
from ssdevice.slots import LAYOUT_ROLE, SlotLayout, Variant, read_layout


def add_app(bundle: Bundle, name: str, folder: Path, half: bool = False) -> str:
    """Put the adapter in ``folder`` into a bundle as app ``name``; neither torch nor the base's folder is needed.

    ``half``: store its floats as float16. The bundle is written anew and replaced at once. What it is missing is a
    sentence in the error. Raises InputError for an adapter that does not fit.
    """
    manifest = bundle.manifest
    check_rule("an app's name", name, NAME)
    if name.lower() in {app.name.lower() for app in manifest.apps}:
        raise InputError(f"{bundle.folder} has an app {name!r}; remove it first: ssdevice bundle remove-app")
    layout = _layout(bundle, name, folder)
    weights = AdapterWeights.read(folder)
    variant = _variant(bundle, layout, weights)
    tensors = fill(weights, variant, bundle.geometry.gamma, layout.hidden)
    # Here, because the runtime of the target is not needed to refuse an adapter.
    from ssdevice.runtime.engines.onnx_adapter import ADAPTER_FILE, ADAPTERS, write_adapter

    own = f"{ADAPTERS}/{name}"
    file = f"{own}/{ADAPTER_FILE}"
    settings = weights.settings
    app = App(
        name=name,
        kind=AdapterKind.SLOT,
        base_sha256=manifest.model.sha256,
        mode=variant.mode,
        msa_layers=variant.msa_layers,
        instruction=settings.instruction if settings is not None else "",
        rank=weights.lora_rank,
        folder=own,
        files=(file,),
        functions=dict(variant.functions),
    )
    signed = (bundle.folder / OWN_FILES[1]).exists()
    with BundleWriter(bundle.folder, overwrite=True) as writer:
        writer.add_bundle(bundle)
        write_adapter(writer.path_for(file), tensors, manifest.model.sha256, half)
        made = writer.commit(dataclasses.replace(manifest, apps=(*manifest.apps, app), files={}, roles={}))
    again = "; its signature was for what it held before: sign it again" if signed else ""
    return f"added app {name} to {bundle.folder} ({made.manifest.files[file].size} bytes, {variant.described}){again}"


def _layout(bundle: Bundle, name: str, folder: Path) -> SlotLayout:
    manifest = bundle.manifest
    if manifest.target is Target.COREML:
        # The apps' adapters are not kept apart from the package: their folders are the caller's to name again.
        apps = " ".join(f"--adapter {app.name}=DIR" for app in manifest.apps if app.kind is not AdapterKind.BASE)
        raise InputError(
            f"{bundle.folder} is a {manifest.target} bundle, whose apps are functions of one package, made together; "
            f"export it again with app {name!r} among them: ssdevice export --model BASE --target {manifest.target} "
            f"--quant {manifest.precision} {apps}{' ' if apps else ''}--adapter {name}={folder} "
            f"--out {bundle.folder} --overwrite"
        )
    if manifest.target is not Target.ONNX:
        raise InputError(f"{bundle.folder} is a {manifest.target} bundle: apps are added to {Target.ONNX} bundles")
    if LAYOUT_ROLE not in manifest.roles:
        raise InputError(
            f"{bundle.folder} has no slot for app {name!r}: its adapter is part of the graphs; "
            f"export with slots: ssdevice export --slots --adapter {name}={folder} .."
        )
    return read_layout(bundle.file(LAYOUT_ROLE))


def _variant(bundle: Bundle, layout: SlotLayout, weights: AdapterWeights) -> Variant:
    """The graphs for this adapter; raises InputError where the bundle or the base is another."""
    settings, manifest = weights.settings, bundle.manifest
    if settings is not None:
        mine = manifest.model
        base = BaseIdentity(mine.model_type, mine.hidden_size, mine.layers, mine.vocab, mine.sha256)
        settings.base.check(base, f"adapter {weights.folder}")
        if settings.streams.gamma < bundle.geometry.gamma:
            raise InputError(
                f"{weights.folder} has γ = {settings.streams.gamma} streams, the draft tree of {bundle.folder} is "
                f"{bundle.geometry.gamma} deep"
            )
    wanted = weights.variant
    found = layout.variant(wanted.name)
    if found is None:
        there = "; ".join(variant.described for variant in layout.variants)
        raise InputError(
            f"{bundle.folder} has no graphs for {wanted.described}; it has those for {there}. Export the bundle again "
            f"with this app among its own: ssdevice export --adapter NAME={weights.folder} .."
        )
    return found
