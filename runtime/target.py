"""What a target is on the runtime side: everything that sessions and commands ask of it. Needs no framework.

``ssdevice.runtime.TARGET.target`` offers ``TARGET``, a ``RuntimeTarget``, whose methods import what they need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ssdevice import targets
from ssdevice.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from ssdevice.bundle.folder import Bundle
    from ssdevice.runtime.apps import NewApp
    from ssdevice.runtime.engine import Engine, EngineOptions


class RuntimeTarget(ABC):
    """One target. ``extra``: of pip, with what its engine needs."""

    name: ClassVar[str]
    extra: ClassVar[str]

    @abstractmethod
    def open_engine(self, bundle: Bundle, app: str | None, options: EngineOptions) -> Engine:
        """The engine of an app; a missing package is a ModuleNotFoundError. Raises BundleError."""

    def new_app(self, bundle: Bundle, name: str, folder: Path) -> NewApp:
        """The adapter in ``folder`` in the form that a bundle of this target takes as a further app.

        Raises InputError where it takes none, or not this one.
        """
        raise InputError(f"{bundle.folder} is a {self.name} bundle, which takes no more apps; export a bundle for each")

    def describe(self, bundle: Bundle) -> dict[str, Any]:
        """What ``inspect`` adds, as plain values by keys of the target's own."""
        return {}

    def print_description(self, console: Console, found: dict[str, Any], size: Callable[[int], str]) -> None:
        """The same for a reader; ``size``: bytes to text."""
        return


def runtime_target(name: str) -> RuntimeTarget:
    """The runtime side of a target; raises ConfigError for a name that is none's, InputError for one without it."""
    module = targets.find(name).runtime
    try:
        return cast(RuntimeTarget, targets.load(module))
    except ModuleNotFoundError as error:
        if not (error.name and module.startswith(error.name)):
            raise
        raise InputError(f"this version of ssdevice cannot run {name} bundles") from error
