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
    """Constants of a package, cached by their origin: a place in the weight file, contents, or a decompression."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._arrays: dict[Hashable, Array] = {}

    @staticmethod
    def key(value: Value) -> Hashable:
        """A key that is equal for constants with equal contents."""
        if isinstance(value.data, np.ndarray):
            return (str(value.data.dtype), value.data.shape, value.data.tobytes())
        return (value.data, value.type)

    def load(self, value: Value) -> Constant:
        """A constant as a string or an array."""
        if isinstance(value.data, str):
            return value.data
        return self.made(self.key(value), lambda: self._package.constant(value))

    def made(self, key: Hashable, make: Callable[[], Any]) -> Array:
        """The array for ``key``, made on first use."""
        if key not in self._arrays:
            array = np.asarray(make())
            array = array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array.view()
            array.flags.writeable = False
            self._arrays[key] = array
        return self._arrays[key]

    def forget(self, value: Value) -> None:
        """Do not keep a constant any longer; what was made of it stays."""
        self._arrays.pop(self.key(value), None)
