"""Running bundles: engines, the decoding loop and sessions. Needs no training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdevice.runtime.generation import Generation
    from ssdevice.runtime.session import Session

__all__ = ["Generation", "Session"]


def __getattr__(name: str) -> Any:
    # Deferred, so that naming the package costs nothing.
    if name == "Session":
        from ssdevice.runtime.session import Session

        return Session
    if name == "Generation":
        from ssdevice.runtime.generation import Generation

        return Generation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
