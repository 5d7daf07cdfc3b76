"""Apps as functions of one package: the names of each app's functions, and the bytes that an app adds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ssdevice.contract import PLAIN
from ssdevice.export.plan import AppPlan, ExportJob, ExportPlan
from ssdevice.mil.audit import places
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import BlobRef
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import LowRank

Names = Mapping[str, str]
"""The contract's functions -> their names in a package."""
HALF_BYTES = 2


def function_names(plan: ExportPlan) -> dict[str, Names]:
    """By app: its functions of the contract -> their names in the package.

    A merged app uses the contract's names. Apps that do not change main rows share the base's plain step.
    """
    if plan.merged:
        return {app.name: {name: name for name in plan.function_names} for app in plan.apps}
    table: dict[str, Names] = {}
    taken = set(plan.function_names)
    for app in plan.apps:
        suffix = "" if app.folder is None else f"_{re.sub(r'[^A-Za-z0-9_]', '_', app.name)}"
        own = plan.of(app).function_names
        while suffix and any(f"{name}{suffix}" in taken for name in own):
            suffix += "_"
        names = {name: PLAIN if name == PLAIN and not app.has_lora else f"{name}{suffix}" for name in own}
        taken.update(names.values())
        table[app.name] = names
    return table


def jobs(job: ExportJob) -> Iterator[tuple[AppPlan, ExportJob]]:
    """A job for each app in turn; finish with one before taking the next."""
    first, *others = job.plan.apps
    yield first, replace(job, plan=job.plan.of(first))
    for app in others:
        yield app, job.for_app(app, job.plan.merged)


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
