"""Constants in the form that kernels take: read-only, floats as float32, each weight once for a whole package."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ssdevice.mil.dtypes import Array
from ssdevice.mil.reader import Package
from ssdevice.mil.registry import Constant
from ssdevice.mil.schema import Value


class ConstantPool:
    """Constants of a package, cached by their origin: a place in the weight file, contents, or a folded operation."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._values: dict[Hashable, Any] = {}

    @staticmethod
    def key(value: Value) -> Hashable:
        """A key that is equal for constants with equal contents."""
        if isinstance(value.data, np.ndarray):
            return (str(value.data.dtype), value.data.shape, value.data.tobytes())
        return (value.data, value.type) if not isinstance(value.data, tuple) else id(value)

    def load(self, value: Value) -> Constant:
        """A constant as a string or an array. A list of strings, which no kernel reads, becomes one string."""
        if isinstance(value.data, str):
            return value.data
        if isinstance(value.data, tuple):
            return ",".join(str(item.data) for item in value.data)
        loaded: Array = self.fold(self.key(value), lambda: self._package.constant(value))
        return loaded

    def fold(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """The value for ``key``, computed on first use."""
        if key not in self._values:
            self._values[key] = _frozen(compute())
        return self._values[key]


def _frozen(value: Any) -> Any:
    """A read-only view of an array, or of each of a sequence; floats as float32."""
    if isinstance(value, tuple | list):
        return tuple(_frozen(item) for item in value)
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    array = array.view()
    array.flags.writeable = False
    return array
