"""Apps as functions of one package: the bytes that an app adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ssdevice.export.app_functions import Names
from ssdevice.mil.audit import places
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


@dataclass(frozen=True)
class Growth:
    """The bytes that an app adds to a package, ``weights`` and ``program``, and those of its ``adapter``."""

    weights: int
    program: int
    adapter: int

    @property
    def bytes(self) -> int:
        """Weights and program together."""
        return self.weights + self.program

    def describe(self, app: str, functions: int) -> str:
        """A sentence for the manifest's notes."""
        return (
            f"app {app} adds {self.bytes} bytes to the package: {self.weights} of weights and {self.program} of "
            f"{functions} graphs; its adapter has {self.adapter} bytes in float16"
        )


def growth(
    package: Package, table: Mapping[str, Names], program: Mapping[str, int], adapters: Mapping[str, int]
) -> dict[str, Growth]:
    """By app: the bytes that only its functions need. ``program``: bytes of each function's graph."""
    users: dict[BlobRef, set[str]] = {}
    sizes: dict[BlobRef, int] = {}
    for name, function in package.functions.items():
        for place, size in places(package, function).items():
            users.setdefault(place, set()).add(name)
            sizes[place] = size
    found = {}
    for app, names in table.items():
        others = {name for other, theirs in table.items() if other != app for name in theirs.values()}
        own = set(names.values()) - others
        weights = sum(sizes[place] for place, functions in users.items() if functions <= own)
        found[app] = Growth(weights, sum(program[name] for name in own), adapters[app])
    return found
