"""Core AI bundles: an asset in Apple's runtime, whose functions share weights and write the KV
cache as state.
"""

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, Self, TypeVar

import numpy as np
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray as CoreAIArray
from numpy.typing import NDArray

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import CHOOSING, KEYS, LOGITS, VALUES, CacheForm, Geometry, functions
from ssdevice.errors import BundleError, first_line
from ssdevice.runtime.engine import Cache, Engine, Inputs, Outputs, check_cache, rows_of_state

PROGRAM = "main.mlirb"
DIGEST = "main.hash"
"""Files of an asset: its functions with their weights, and the sha256 of that file."""
Result = TypeVar("Result")
Arrays = Mapping[str, CoreAIArray]


class OpenAsset:
    """An asset prepared for this machine.

    Calls run one at a time, in a thread of their own. The runtime's functions are asynchronous and
    may be called while the caller's thread runs an event loop itself, as notebooks do, so the asset
    has its own loop. Raises BundleError for a file that the runtime refuses.
    """

    def __init__(self, path: Path) -> None:
        check_program(path)
        self.path = path
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(
            target=self._loop.run_forever, name=f"coreai {path.name}", daemon=True
        )
        self._thread.start()
        self._open = AsyncExitStack()
        self._functions: dict[str, Any] = {}
        try:
            self._model = self._wait(self._enter())
        except Exception as error:
            self.close()
            raise BundleError(
                f"{path}: Core AI cannot open it ({first_line(error)}); export the bundle again"
            ) from error

    def function(self, name: str) -> Any:
        """A function of the asset, loaded on first use.

        Raises BundleError for one that it does not have.
        """
        if name not in self._functions:
            if name not in self._model.function_names:
                raise BundleError(
                    f"{self.path}: it has no function {name!r}; export the bundle again"
                )
            self._functions[name] = self._model.load_function(name)
        return self._functions[name]

    def call(self, name: str, inputs: Arrays, state: Arrays) -> Arrays:
        """The outputs of a function by name.

        Writes the new rows into ``state``. Raises BundleError.
        """
        function = self.function(name)

        async def run() -> Arrays:
            outputs: Arrays = await function(dict(inputs), dict(state))
            return outputs

        try:
            return self._wait(run())
        except Exception as error:
            raise BundleError(
                f"{self.path}: {name} failed in Core AI's runtime ({first_line(error)})"
            ) from error

    def close(self) -> None:
        self._functions.clear()
        self._model = None
        self._wait(self._open.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _enter(self) -> Any:
        return await self._open.enter_async_context(AIModelAsset.load(self.path).executable())

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def check_program(asset: Path) -> None:
    """Raise BundleError for a missing or damaged file: Apple's compiler would end the whole
    process.
    """
    try:
        with (asset / PROGRAM).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
        expected = (asset / DIGEST).read_bytes()
    except OSError as error:
        raise BundleError(f"{asset}: not an asset of Core AI ({error.strerror})") from error
    if found != expected:
        raise BundleError(
            f"{asset / PROGRAM} is damaged: its sha256 is not that in {DIGEST}; "
            "export the bundle again"
        )


MODEL = "model"
"""Role of the asset."""
CACHE_DTYPE = "float32"


class CoreAIEngine(Engine):
    """An asset opened for one app.

    ``names``: the contract's functions -> their names in the asset. ``shows_logits``: whether calls
    return those of steps, which takes time.
    """

    shows_logits = False

    def __init__(self, asset: Path, geometry: Geometry, names: Mapping[str, str]) -> None:
        super().__init__(geometry, frozenset(names), asset)
        self.names = dict(names)
        self.specs = functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)
        self.asset = OpenAsset(asset)

    @classmethod
    def of(cls, bundle: Bundle, app: str | None) -> Self:
        """The engine of an app.

        Raises BundleError for another cache form, or an asset that does not open.
        """
        check_cache(bundle, CacheForm.INTERNAL, CACHE_DTYPE)
        return cls(bundle.file(MODEL), bundle.geometry, bundle.function_names(app))

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> "CoreAICache":
        return CoreAICache(self, inputs)

    def warm(self) -> None:
        for name in self.names.values():
            self.asset.function(name)

    def release(self) -> None:
        self.asset.close()


class CoreAICache(Cache):
    """Keys and values ``[layers, kv_heads, capacity, head_dim]``."""

    def __init__(self, engine: CoreAIEngine, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.engine = engine
        g = engine.geometry
        shape = (g.layers, g.kv_heads, g.capacity, g.head_dim)
        # The runtime's own new arrays hold anything, also what masks cannot hide: NaN.
        self.state = {name: CoreAIArray(np.zeros(shape, CACHE_DTYPE)) for name in (KEYS, VALUES)}

    def call(self, function: str, length: int) -> Outputs:
        given = self.engine.specs[function].inputs
        integers = {tensor.name: CoreAIArray(self.inputs[tensor.name]) for tensor in given}
        clock = perf_counter()
        outputs = self.engine.asset.call(self.engine.names[function], integers, self.state)
        self.native_seconds += perf_counter() - clock
        shown = self.engine.shows_logits or function in CHOOSING
        return {name: array.numpy() for name, array in outputs.items() if name != LOGITS or shown}

    def rows(self, start: int, end: int) -> NDArray[Any]:
        return rows_of_state(self.state[KEYS].numpy(), self.state[VALUES].numpy(), start, end)
