"""The interface of a target on the runtime side, for sessions and commands. Needs no framework.

``ssdevice.runtime.TARGET.target`` defines ``TARGET``, a ``RuntimeTarget``, whose methods import
what they need.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ssdevice import targets
from ssdevice.errors import BundleError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ssdevice.bundle.folder import Bundle
    from ssdevice.runtime.engine import Engine, EngineOptions

AppFile = tuple[str, Callable[[Path, Mapping[str, "NDArray[Any]"]], None]]
"""The name of an app's file, and a function that writes tensors by name to a path."""


class RuntimeTarget(ABC):
    """One target.

    ``extra``: the pip extra that its engine needs; ``heeds``: the EngineOptions that have an
    effect.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    heeds: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def open_engine(self, bundle: "Bundle", app: str | None, options: "EngineOptions") -> "Engine":
        """The engine of an app.

        Raises BundleError, and ModuleNotFoundError for a missing package.
        """

    def app_file(self, bundle: "Bundle", name: str, folder: Path) -> AppFile:
        """The name of the file that holds a further app's tensors, and what writes it.

        ``name``, ``folder``: the app's, for messages. Raises InputError for a target whose bundles
        take no more apps.
        """
        raise InputError(
            f"{bundle.folder} is a {self.name} bundle, which takes no more apps; "
            "export a bundle for each"
        )

    def build_kernels(self) -> Path | None:
        """Compile what makes this target faster on this machine; None if there is nothing to
        compile.

        Raises InputError if it cannot be compiled here.
        """
        return None

    def check_browser(self, bundle: "Bundle") -> None:
        """Raise BundleError for a bundle that the page of ``ssdevice web`` does not run."""
        raise BundleError(
            f"{bundle.folder} is for {self.name}; browsers run bundles of --target onnx"
        )

    def describe(self, bundle: "Bundle") -> dict[str, Any]:
        """What ``inspect`` adds for this target, as plain values."""
        return {}


def runtime_target(name: str) -> RuntimeTarget:
    """The runtime side of a target.

    Raises ConfigError for an unknown name, InputError for a target without one.
    """
    module = targets.find(name).runtime
    try:
        return cast(RuntimeTarget, targets.load(module))
    except ModuleNotFoundError as error:
        raise InputError(f"this version of ssdevice cannot run {name} bundles") from error
