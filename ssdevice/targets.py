"""Targets by name: the module of each one's export side and of its runtime side.

Nothing else in the core knows a target. Another package brings its own as an entry point of the group
``ssdevice.targets``, ``NAME = "PACKAGE"``: then ``PACKAGE.export`` and ``PACKAGE.runtime`` are those modules.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from ssdevice.errors import ConfigError

BUILT_IN = ("onnx", "coreml", "executorch")
DEFAULT = "onnx"
"""What needs no extra to run."""
ENTRY_POINTS = "ssdevice.targets"


@dataclass(frozen=True)
class Target:
    """Two modules that offer ``TARGET``: ``export`` an ``ExportTarget``, ``runtime`` a ``RuntimeTarget``."""

    name: str
    export: str
    runtime: str


_registered = {
    name: Target(name, f"ssdevice.export.{name}.target", f"ssdevice.runtime.{name}.target") for name in BUILT_IN
}


def register(name: str, export: str, runtime: str) -> None:
    """Add a target of this process; raises ConfigError for a name that another target has."""
    added = Target(name, export, runtime)
    if _registered.setdefault(name, added) != added:
        raise ConfigError(f"target {name!r} is registered twice: {_registered[name].export} and {export}")


def names() -> tuple[str, ...]:
    """Every target, those of other packages last."""
    _read_entry_points()
    return tuple(_registered)


def find(name: str) -> Target:
    """The target of this name; raises ConfigError naming those there are."""
    if name not in _registered:
        _read_entry_points()
    if name not in _registered:
        raise ConfigError(f"{name[:60]!r} is not one of {', '.join(_registered)}")
    return _registered[name]


def load(module: str) -> Any:
    """The ``TARGET`` that a module offers."""
    return importlib.import_module(module).TARGET


def _read_entry_points() -> None:
    from importlib.metadata import entry_points  # slow to import, and most runs have no use for it

    for point in entry_points(group=ENTRY_POINTS):
        register(point.name, f"{point.value}.export", f"{point.value}.runtime")
