"""Core AI bundles: an asset whose functions share weights, and take the KV cache as state that they write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from coreai.runtime import NDArray as CoreAIArray
from numpy.typing import NDArray

from ssdevice.contract import KEYS, VALUES, CacheForm, Geometry, functions
from ssdevice.runtime.coreai.asset import OpenAsset
from ssdevice.runtime.engine import Cache, Engine, Inputs, Outputs, check_cache, rows_of_state

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

MODEL = "model"
"""Role of the asset."""
CACHE_DTYPE = "float32"


class CoreAIEngine(Engine):
    """An asset opened for one app. ``names``: the contract's functions -> their names in the asset."""

    def __init__(self, asset: Path, geometry: Geometry, names: Mapping[str, str]) -> None:
        super().__init__(geometry, frozenset(names), asset)
        self.names = dict(names)
        specs = functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)
        self.integers = {name: [tensor.name for tensor in specs[name].inputs] for name in names}
        self.asset = OpenAsset(asset)

    @classmethod
    def of(cls, bundle: Bundle, app: str | None) -> Self:
        """The engine of an app. Raises BundleError for another cache form, or an asset that does not open."""
        check_cache(bundle, CacheForm.INTERNAL, CACHE_DTYPE)
        return cls(bundle.file(MODEL), bundle.geometry, bundle.function_names(app))

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> CoreAICache:
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
        g = engine.geometry
        self.engine = engine
        shape = (g.layers, g.kv_heads, g.capacity, g.head_dim)
        # The runtime's own new arrays hold anything, also what masks cannot hide: NaN.
        self.state = {name: CoreAIArray(np.zeros(shape, CACHE_DTYPE)) for name in (KEYS, VALUES)}

    def call(self, function: str, length: int) -> Outputs:
        integers = {name: CoreAIArray(self.inputs[name]) for name in self.engine.integers[function]}
        clock = perf_counter()
        outputs = self.engine.asset.call(self.engine.names[function], integers, self.state)
        self.native_seconds += perf_counter() - clock
        return {name: array.numpy() for name, array in outputs.items()}

    def rows(self, start: int, end: int) -> NDArray[Any]:
        keys, values = (self.state[name].numpy() for name in (KEYS, VALUES))
        return rows_of_state(keys, values, start, end)
