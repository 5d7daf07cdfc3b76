"""What a target's engine is to the loop: three functions that move integers, and where engines are found.

A target's ``RuntimeTarget`` opens its engine; nothing else about it is known outside its folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssdevice.contract import Geometry
from ssdevice.errors import ConfigError, MissingExtraError
from ssdevice.runtime.target import runtime_target

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs. ``threads``: 0 for the engine's default. ``spinning``: threads wait busily between calls.

    ``profile``: gather where time goes inside the target, for engines that can tell.
    """

    threads: int = 0
    spinning: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}, expected 0 (the engine's default) or more")


class Conversation(ABC):
    """One KV cache and the contract's functions on it. None of them changes ``length``: the loop alone does.

    ``length``: committed rows, so that going back is lowering it. ``drafts [γ, k] int32``: what the last prefill or
    step drafted and the next step will verify; anything may be written into it, only speed depends on it.
    ``native_seconds``: time spent inside the target's own runtime so far; the rest of a step is the host's.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.length = 0
        self.drafts: NDArray[np.int32] = np.zeros((geometry.gamma, geometry.k), dtype=np.int32)
        self.native_seconds = 0.0

    @abstractmethod
    def prefill(self, chunk: Sequence[int]) -> int:
        """Write the rows of 1..C prompt tokens at ``length`` on; the next token. Sets ``drafts``."""

    @abstractmethod
    def step(self, root: int) -> list[int]:
        """Verify ``drafts`` after ``root``: the 1..A emitted tokens.

        Writes the rows of ``root`` and of all emitted tokens but the last at ``length`` on, and sets ``drafts`` to the
        next draft, which belongs to the last of these tokens.
        """

    @abstractmethod
    def step_plain(self, root: int) -> int:
        """The token after ``root``, whose row is written at ``length``. Leaves ``drafts``."""


@dataclass(frozen=True)
class Kernel:
    """A node of a graph: its operator, and the microseconds that it takes in a call."""

    node: str
    operator: str
    microseconds: float


class Engine(ABC):
    """A bundle opened for one app. ``functions``: which of the contract's functions it has."""

    def __init__(self, geometry: Geometry, functions: frozenset[str]) -> None:
        self.geometry = geometry
        self.functions = functions

    @abstractmethod
    def new_conversation(self) -> Conversation:
        """An empty conversation. Where a target holds one state per program, it ends the previous one."""

    def conversation_beside(self, other: Conversation) -> Conversation:
        """An empty conversation that may use the memory of ``other``, of another app's engine of the same bundle.

        They take turns: whichever goes on begins anew. Targets that cannot share give it memory of its own.
        """
        return self.new_conversation()

    def warm(self) -> None:
        """Open now what the first calls would open, where a target opens things late."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release the target's memory; the engine and its conversations are then unusable."""

    def profile(self) -> dict[str, list[Kernel]]:
        """What one call of each function spends in kernels, where the target tells; for ``options.profile``."""
        return {}


def open_engine(bundle: Bundle, app: str | None, options: EngineOptions) -> Engine:
    """The engine of a bundle's target with an app's adapter (None: the bundle's only or first app).

    Raises MissingExtraError if the target's runtime is not installed, InputError for a target without an engine.
    """
    target = runtime_target(bundle.manifest.target)
    try:
        return target.open_engine(bundle, app, options)
    except ModuleNotFoundError as error:
        raise MissingExtraError(target.extra, error.name or target.name) from error
