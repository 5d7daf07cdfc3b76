"""Runs bundles: engines, the decoding loop and sessions. Needs no training framework."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdevice.runtime.generation import Generation
    from ssdevice.runtime.session import Session

__all__ = ["Generation", "Session"]


def __getattr__(name: str) -> Any:
    # Deferred, so that importing the package costs nothing.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
