"""Targets by name: the modules of their export sides and their runtime sides.

Nothing else in the core knows a target. Another package adds one with an entry point of the group
``ssdevice.targets``::

    NAME = "PACKAGE"

Its modules are then ``PACKAGE.export`` and ``PACKAGE.runtime``.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from ssdevice.errors import ConfigError, first_line

BUILT_IN = ("onnx", "coreml", "executorch", "coreai")
DEFAULT = "onnx"
"""The target that runs without an extra."""
ENTRY_POINTS = "ssdevice.targets"


@dataclass(frozen=True)
class Target:
    """Two modules that define ``TARGET``.

    In ``export`` it is an ``ExportTarget``, in ``runtime`` a ``RuntimeTarget``.
    """

    export: str
    runtime: str


_registered = {
    name: Target(f"ssdevice.export.{name}.target", f"ssdevice.runtime.{name}.target")
    for name in BUILT_IN
}


def register(name: str, export: str, runtime: str) -> None:
    """Add a target in this process. Raises ConfigError if another target has this name."""
    added = Target(export, runtime)
    if _registered.setdefault(name, added) != added:
        raise ConfigError(
            f"target {name!r} is registered twice: {_registered[name].export} and {export}"
        )


def names() -> tuple[str, ...]:
    """The names of all targets, those of other packages last."""
    _read_entry_points()
    return tuple(_registered)


def find(name: str) -> Target:
    """The target with this name. Raises ConfigError, which lists the known names."""
    if name not in _registered:
        _read_entry_points()
    if name not in _registered:
        raise ConfigError(f"{name[:60]!r} is not one of {', '.join(_registered)}")
    return _registered[name]


def load(module: str) -> Any:
    """The ``TARGET`` of a module.

    Raises ModuleNotFoundError if there is no such module, ConfigError if it cannot be loaded.
    """
    try:
        return importlib.import_module(module).TARGET
    except Exception as error:  # modules of other packages may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
            raise
        raise ConfigError(
            f"{module} cannot be loaded ({first_line(error)}); "
            "repair or uninstall the package of this target"
        ) from error


def _read_entry_points() -> None:
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    for point in entry_points(group=ENTRY_POINTS):
        register(point.name, f"{point.value}.export", f"{point.value}.runtime")
