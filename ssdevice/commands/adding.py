"""A new app for a bundle whose base has slots: its adapter is checked, written in the target's form, and listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ssdevice.adapters.safetensors_file import write_tensors
from ssdevice.adapters.slots import LAYOUT_ROLE, SlotLayout, Variant, read_layout, read_program_layout
from ssdevice.adapters.storage import stored
from ssdevice.adapters.weights import AdapterWeights, fill, fill_program
from ssdevice.bundle.folder import OWN_FILES, Bundle, BundleWriter
from ssdevice.bundle.integrity import check_rule
from ssdevice.bundle.manifest import NAME, AdapterKind, App, Precision
from ssdevice.config import Target
from ssdevice.errors import InputError


def add_app(bundle: Bundle, name: str, folder: Path, precision: Precision = Precision.FP32) -> str:
    """Put the adapter in ``folder`` into a bundle as app ``name``; neither torch nor the base's folder is needed.

    ``precision``: how its floats are stored. The bundle is written anew and replaced at once. What it is missing is a
    sentence in the error. Raises InputError for an adapter that does not fit.
    """
    manifest = bundle.manifest
    check_rule("an app's name", name, NAME)
    if name.lower() in {app.name.lower() for app in manifest.apps}:
        raise InputError(f"{bundle.folder} has an app {name!r}; remove it first: ssdevice bundle remove-app")
    file = _slots_file(bundle, name, folder)
    weights = AdapterWeights.read(folder)
    made = _for_program if manifest.target is Target.EXECUTORCH else _for_graphs
    addition = made(bundle, file, weights)
    own = f"{addition.parent}/{name}"
    path = f"{own}/{addition.file}"
    settings, variant = weights.settings, addition.variant
    app = App(
        name=name,
        kind=AdapterKind.SLOT,
        base_sha256=manifest.model.sha256,
        mode=variant.mode,
        msa_layers=variant.msa_layers,
        instruction=settings.instruction if settings is not None else "",
        rank=weights.lora_rank,
        folder=own,
        files=(path,),
        functions=dict(addition.functions),
    )
    signed = (bundle.folder / OWN_FILES[1]).exists()
    with BundleWriter(bundle.folder, overwrite=True) as writer:
        writer.add_bundle(bundle)
        addition.write(writer.path_for(path), stored(addition.tensors, precision))
        written = writer.commit(dataclasses.replace(manifest, apps=(*manifest.apps, app), files={}, roles={}))
    again = "; its signature was for what it held before: sign it again" if signed else ""
    size = written.manifest.files[path].size
    return f"added app {name} to {bundle.folder} ({size} bytes, {variant.described}){again}"


@dataclass(frozen=True)
class _Addition:
    """How a target keeps an app's ``tensors``. ``write``: them into a path; ``file`` stands in ``parent/<app>``."""

    variant: Variant
    functions: Mapping[str, str]
    parent: str
    file: str
    tensors: Mapping[str, NDArray[Any]]
    write: Callable[[Path, Mapping[str, NDArray[Any]]], None]


def _for_graphs(bundle: Bundle, file: Path, weights: AdapterWeights) -> _Addition:
    """For graphs whose slots are inputs."""
    # Here, because the runtime of the target is not needed to refuse an adapter.
    from ssdevice.runtime.onnx.adapter import ADAPTER_FILE, ADAPTERS, write_adapter

    layout = read_layout(file)
    variant = _variant(bundle, layout, weights)
    tensors = fill(weights, variant, bundle.geometry.gamma, layout.hidden)

    def write(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
        write_adapter(path, tensors, bundle.manifest.model.sha256)

    return _Addition(variant, variant.functions, ADAPTERS, ADAPTER_FILE, tensors, write)


def _for_program(bundle: Bundle, file: Path, weights: AdapterWeights) -> _Addition:
    """For a program whose slots are state."""
    from ssdevice.runtime.executorch.adapters import ADAPTER_FILE, ADAPTERS, functions_of

    layout, wanted = read_program_layout(file), weights.variant
    _check_base(bundle, weights)
    if not layout.takes(wanted):
        raise InputError(
            f"{bundle.folder} has no program for {wanted.described}; its own is for {layout.variant.described}. "
            f"Export a bundle for it: ssdevice export --slots --adapter NAME={weights.folder} .."
        )
    tensors = fill_program(weights, layout, bundle.geometry.gamma)
    return _Addition(wanted, functions_of(wanted.mode is not None), ADAPTERS, ADAPTER_FILE, tensors, write_tensors)


def _slots_file(bundle: Bundle, name: str, folder: Path) -> Path:
    """The bundle's layout; raises InputError for a bundle that takes no more apps."""
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
    if LAYOUT_ROLE not in manifest.roles:
        raise InputError(
            f"{bundle.folder} has no slot for app {name!r}: its adapter is part of the graphs; "
            f"export with slots: ssdevice export --slots --adapter {name}={folder} .."
        )
    return bundle.file(LAYOUT_ROLE)


def _variant(bundle: Bundle, layout: SlotLayout, weights: AdapterWeights) -> Variant:
    """The graphs for this adapter; raises InputError where the bundle or the base is another."""
    _check_base(bundle, weights)
    wanted = weights.variant
    found = layout.variant(wanted.name)
    if found is None:
        there = "; ".join(variant.described for variant in layout.variants)
        raise InputError(
            f"{bundle.folder} has no graphs for {wanted.described}; it has those for {there}. Export the bundle again "
            f"with this app among its own: ssdevice export --adapter NAME={weights.folder} .."
        )
    return found


def _check_base(bundle: Bundle, weights: AdapterWeights) -> None:
    """Raise InputError for an adapter of another base, or with fewer streams than the tree is deep."""
    settings, manifest = weights.settings, bundle.manifest
    if settings is not None:
        settings.base.check(manifest.model, f"adapter {weights.folder}")
        if settings.streams.gamma < bundle.geometry.gamma:
            raise InputError(
                f"{weights.folder} has γ = {settings.streams.gamma} streams, the draft tree of {bundle.folder} is "
                f"{bundle.geometry.gamma} deep"
            )
