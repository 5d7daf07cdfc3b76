"""The interface of a target's engine: KV caches, and the contract's functions called on them.

A target's ``RuntimeTarget`` opens its engine. Nothing else about the target is known outside its
folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice import arguments
from ssdevice.bundle.folder import Bundle
from ssdevice.contract import CacheForm, Geometry
from ssdevice.errors import BundleError, needs_extra
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.notice import say_once
from ssdevice.runtime.target import runtime_target

Inputs = Mapping[str, NDArray[np.int32]]
Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs.

    ``threads``: 0 for the engine's default.
    ``spinning``: threads busy-wait for work, during a call and 2 ms more at most.
    ``profile``: record where time is spent inside the target, for engines that can.
    ``kernels``: use those that ``ssdevice kernels`` built.
    """

    threads: int = 0
    spinning: bool = True
    profile: bool = False
    kernels: bool = True

    def __post_init__(self) -> None:
        arguments.whole("threads", self.threads, 0)
        for name in ("spinning", "profile", "kernels"):
            arguments.flag(name, getattr(self, name))


class Cache(ABC):
    """One KV cache, and the contract's functions called on it.

    ``inputs``: the integers of all functions by tensor name, written in place, so that a target can
    bind their memory once.
    ``native_seconds``: time inside the target's runtime so far; the rest of a step is the host's.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.native_seconds = 0.0

    def begin(self, answer: Generation) -> None:
        """Called when an answer begins. An engine may note in it what only the engine knows."""
        return

    @abstractmethod
    def call(self, function: str, length: int) -> Outputs:
        """The outputs of a function on ``inputs`` by name, valid until the next call.

        ``length``: committed rows, as in ``inputs``. New rows are written after them, here or by
        ``commit``.
        """

    def commit(self, outputs: Outputs, length: int, count: int) -> None:
        """Write the first ``count`` new rows of ``outputs`` at ``length``.

        Does nothing where the graph holds the cache.
        """
        return

    def rows(self, start: int, end: int) -> NDArray[Any] | None:
        """A copy of rows ``[2 * layers, end - start, kv_heads * head_dim]``.

        Keys and values of each layer come in turn. None if the target does not show them.
        """
        return None


def rows_of_state(keys: NDArray[Any], values: NDArray[Any], start: int, end: int) -> NDArray[Any]:
    """``Cache.rows`` for keys and values that a target holds in this form.

    ``keys``, ``values``: ``[layers, kv_heads, capacity, head_dim]``.
    """
    both = np.stack([keys[:, :, start:end], values[:, :, start:end]], axis=1)
    layers, _, heads, count, size = both.shape
    return both.transpose(0, 1, 3, 2, 4).reshape(2 * layers, count, heads * size)


@dataclass(frozen=True)
class Kernel:
    """A node of a graph, its operator, and the microseconds it takes per call."""

    node: str
    operator: str
    microseconds: float


class Engine(ABC):
    """A bundle opened for one app.

    ``functions``: those of the contract's functions that the app has.
    ``source``: the file or folder that it was opened from, for messages.
    ``kernels``: the library of ``ssdevice kernels`` that it uses, and with it a ``Chooser``; None
    without one.
    """

    kernels: Any = None

    def __init__(self, geometry: Geometry, functions: frozenset[str], source: Path) -> None:
        self.geometry = geometry
        self.functions = functions
        self.source = source
        self.closed = False

    @abstractmethod
    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> Cache:
        """An empty cache.

        ``beside``: another app's cache of the same bundle. The two may share memory and take turns,
        each of which starts from an empty cache. Targets that cannot share memory ignore it.
        """

    @abstractmethod
    def release(self) -> None:
        """Release the target's memory. Called once, by ``close``."""

    def new_conversation(self, beside: Conversation | None = None) -> Conversation:
        """An empty conversation; ``beside``: see ``new_cache``.

        Raises InputError if there is no memory for it.
        """
        return Conversation(self, beside)

    def warm(self) -> None:
        """Open now what the first calls would open."""
        return

    def close(self) -> None:
        """Release the target's memory; the engine and its conversations are then unusable."""
        if not self.closed:
            self.closed = True
            self.release()

    def profile(self) -> dict[str, list[Kernel]]:
        """The kernels of one call of each function; none without ``EngineOptions.profile``."""
        return {}


OpenEngine = Callable[[Bundle, str | None, EngineOptions], Engine]
"""Opens the engine of one of a bundle's apps, as ``open_engine`` does."""


def open_engine(bundle: Bundle, app: str | None, options: EngineOptions) -> Engine:
    """The engine of a bundle's target with an app's adapter (None: the default app).

    Says on stderr which options have no effect. Raises MissingExtraError if the target's runtime is
    not installed, InputError for a target without an engine.
    """
    target = runtime_target(bundle.manifest.target)
    usual = EngineOptions()
    for name in sorted(vars(options).keys() - target.heeds):
        if getattr(options, name) != getattr(usual, name):
            say_once(f"ssdevice: the option {name} has no effect on {target.name} bundles")
    with needs_extra(target.extra):
        return target.open_engine(bundle, app, options)


def check_cache(bundle: Bundle, form: CacheForm, dtype: str | None = None) -> None:
    """Raise BundleError for a cache that the target's engine does not have.

    ``dtype``: None for any.
    """
    found = bundle.manifest
    if found.cache is form and dtype in (None, found.cache_dtype):
        return
    expected = f"form {form}" if dtype is None else f"{dtype} in form {form}"
    raise BundleError(
        f"{bundle.folder}: a {found.cache_dtype} cache in form {found.cache}, "
        f"{found.target} bundles have {expected}"
    )
