"""The table of kernels, which turn operations into NumPy functions, and what a kernel sees of its operation.

A kernel is built once per operation: ``build(node)`` reads the constant parameters and returns a function of the
values it needs at run time, the ``operands`` of its registration. Floating-point operands are float32 whatever the
program declares, and float64 for kernels that sum. ``Program`` rounds the result to the declared type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ssdevice.errors import SSDeviceError
from ssdevice.mil.dtypes import Array

Tensor: TypeAlias = Any  # what kernels compute with: an array, or NumPy's scalar where the rank is 0
Function = Callable[..., Any]
Build = Callable[["Node"], Function]
Constant = Array | str


class UnsupportedOpError(SSDeviceError):
    """A program uses an operation, or a form of one, that has no kernel here."""


class ExecutionError(SSDeviceError):
    """An operation could not be executed: an index out of range, shapes that do not fit, a missing parameter."""


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    ``exact``: it only moves or compares values, so its output needs no rounding. ``weight``: it decompresses a
    constant, which keeps its declared type in every precision. ``sums``: it adds values and gets float64 operands, so
    that the rounded sum does not depend on the order of its terms. A kernel never writes into its operands.
    """

    build: Build
    operands: tuple[str, ...]
    exact: bool = False
    weight: bool = False
    sums: bool = False


KERNELS: dict[str, Kernel] = {}


def kernel(kind: str, operands: str, **traits: bool) -> Callable[[Build], Build]:
    """Register ``build`` for an operation.

    ``operands``: names in order; ``?`` marks one that may be absent, ``*`` one that takes a tuple. ``traits``: fields
    of Kernel.
    """

    def register(build: Build) -> Build:
        KERNELS[kind] = Kernel(build, tuple(operands.split()), **traits)
        return build

    return register


def define(kind: str, operands: str, function: Function, **traits: bool) -> None:
    """Register an operation without constant parameters: its kernel is ``function`` itself."""
    kernel(kind, operands, **traits)(lambda node: function)


@dataclass
class Node:
    """An operation as its kernel sees it: ``constants`` maps a parameter to what is known of it before running.

    A parameter absent from the operation, or a tuple, is not in ``constants``; one only known at run time is None.
    """

    where: str
    constants: Mapping[str, Constant | None]

    def has(self, name: str) -> bool:
        """Whether the operation gives this parameter at all."""
        return name in self.constants

    def array(self, name: str) -> Array:
        """A constant tensor parameter. Raises UnsupportedOpError if it is only known at run time."""
        value = self._value(name)
        if isinstance(value, str):
            raise ExecutionError(f"{self.where}: parameter {name!r} is a string, expected numbers")
        return value

    def ints(self, name: str) -> list[int]:
        """A constant vector of integers."""
        return [int(value) for value in self.array(name).reshape(-1)]

    def integer(self, name: str, default: int | None = None) -> int:
        """A constant integer."""
        return int(self._scalar(name, default))

    def number(self, name: str, default: float | None = None) -> np.float32:
        """A constant number as float32."""
        return np.float32(self._scalar(name, default))

    def flag(self, name: str, default: bool = False) -> bool:
        """A constant truth value."""
        return bool(self._scalar(name, default))

    def text(self, name: str, default: str | None = None) -> str:
        """A constant string."""
        if not self.has(name) and default is not None:
            return default
        value = self._value(name)
        if not isinstance(value, str):
            raise ExecutionError(f"{self.where}: parameter {name!r} is not a string")
        return value

    def unsupported(self, what: str) -> UnsupportedOpError:
        """The error for a variant of the operation that is not implemented."""
        return UnsupportedOpError(f"{self.where}: {what} is not supported")

    def _scalar(self, name: str, default: Any) -> Any:
        if not self.has(name):
            if default is None:
                raise ExecutionError(f"{self.where}: parameter {name!r} is missing")
            return default
        value = self.array(name)
        if value.size != 1:
            raise ExecutionError(f"{self.where}: parameter {name!r} has {value.size} elements, expected 1")
        return value.reshape(-1)[0]

    def _value(self, name: str) -> Constant:
        if name not in self.constants:
            raise ExecutionError(f"{self.where}: parameter {name!r} is missing or a tuple")
        value = self.constants[name]
        if value is None:
            raise self.unsupported(f"a parameter {name!r} that is only known at run time")
        return value
