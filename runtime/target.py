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
    """One target. ``extra``: of pip, with what its engine needs; ``timed``: whether ``times`` can be asked for."""

    name: ClassVar[str]
    extra: ClassVar[str]
    timed: ClassVar[bool] = False

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

    def check_timed(self, bundle: Bundle) -> None:
        """Raise InputError for a bundle whose functions ``times`` cannot take apart."""
        timed = " and ".join(name for name in targets.names() if runtime_target(name).timed)
        raise InputError(
            f"--time is for {timed} bundles, {bundle.folder} is for {self.name}: "
            "use `ssdevice bench BUNDLE --data FILE --profile`"
        )

    def times(
        self, bundle: Bundle, threads: int, committed: int | None, report: Callable[[str, int, int], None]
    ) -> dict[str, Any]:
        """What the parts of each function take, as plain values; after ``check_timed``."""
        raise NotImplementedError

    def print_times(self, console: Console, times: dict[str, Any]) -> None:
        """The same for a reader."""
        raise NotImplementedError


def runtime_target(name: str) -> RuntimeTarget:
    """The runtime side of a target; raises ConfigError for a name that is none's, InputError for one without it."""
    module = targets.find(name).runtime
    try:
        return cast(RuntimeTarget, targets.load(module))
    except ModuleNotFoundError as error:
        if not (error.name and module.startswith(error.name)):
            raise
        raise InputError(f"this version of ssdevice cannot run {name} bundles") from error
