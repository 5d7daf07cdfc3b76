"""Apps as functions of one package: the bytes that an app adds."""

from __future__ import annotations

from collections.abc import Mapping

from ssdevice.export.app_functions import Names
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import BlobRef
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import LowRank

HALF_BYTES = 2


def adapter_bytes(model: StreamModel) -> int:
    """Size of an app in bytes of float16: LoRA, stream adapters and the streams' own vectors."""
    own = {id(p): p for part in model.modules() if isinstance(part, LowRank) for p in part.parameters()}
    if model.streams is not None:
        own |= {id(p): p for p in model.streams.parameters()}
    return HALF_BYTES * sum(parameter.numel() for parameter in own.values())


def growth(
    package: Package, table: Mapping[str, Names], program: Mapping[str, int], adapters: Mapping[str, int]
) -> dict[str, str]:
    """By app: a sentence on the bytes that only its functions need, for the manifest's notes.

    ``program``: bytes of each function's graph. ``adapters``: bytes of each app's adapter.
    """
    users: dict[BlobRef, set[str]] = {}
    sizes: dict[BlobRef, int] = {}
    for name, function in package.functions.items():
        for place, size in package.places(function).items():
            users.setdefault(place, set()).add(name)
            sizes[place] = size
    found = {}
    for app, names in table.items():
        others = {name for other, theirs in table.items() if other != app for name in theirs.values()}
        own = set(names.values()) - others
        weights = sum(sizes[place] for place, functions in users.items() if functions <= own)
        graphs = sum(program[name] for name in own)
        found[app] = (
            f"app {app} adds {weights + graphs} bytes to the package: {weights} of weights and {graphs} of "
            f"{len(names)} graphs; its adapter has {adapters[app]} bytes in float16"
        )
    return found
