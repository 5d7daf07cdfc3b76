"""The table of kernels: NumPy functions of an operation's operands and of its constant parameters.

Operands are what may be known only at run time. Floating-point operands are float32 whatever the program declares, and
float64 for kernels that sum. ``Program`` rounds the result to the declared type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ssdevice.errors import SSDeviceError
from ssdevice.mil.dtypes import Array

Tensor: TypeAlias = Any  # what kernels compute with: an array, or NumPy's scalar where the rank is 0
Function = Callable[..., Any]
Constant = Array | str


class UnsupportedOpError(SSDeviceError):
    """A program uses an operation, or a form of one, that has no kernel here."""


class ExecutionError(SSDeviceError):
    """An operation could not be executed: an index out of range, shapes that do not fit, a missing parameter."""


@dataclass(frozen=True)
class Kernel:
    """One kernel: ``function(*operands, **parameters)``, which never writes into its operands.

    ``exact``: it only moves or compares values, so its output needs no rounding. ``weight``: it decompresses a
    constant, which keeps its declared type in every precision. ``sums``: it adds values and gets float64 operands, so
    that the rounded sum does not depend on the order of its terms.
    """

    function: Function
    operands: tuple[str, ...]
    parameters: frozenset[str]
    exact: bool = False
    weight: bool = False
    sums: bool = False


KERNELS: dict[str, Kernel] = {}


def kernel(kind: str, operands: str, **traits: bool) -> Callable[[Function], Function]:
    """Register a function for an operation; the constants that it takes are its keyword-only parameters.

    ``operands``: names in order; ``?`` marks one that may be absent, ``*`` one that takes a tuple. ``traits``: fields
    of Kernel.
    """

    def register(function: Function) -> Function:
        taken = {} if isinstance(function, np.ufunc) else inspect.signature(function).parameters
        named = frozenset(name for name, one in taken.items() if one.kind is inspect.Parameter.KEYWORD_ONLY)
        KERNELS[kind] = Kernel(function, tuple(operands.split()), named, **traits)
        return function

    return register


def plain(value: Constant) -> Any:
    """A constant as kernels take it: a text, a number, a list of integers or truth values, or an array of floats."""
    if isinstance(value, str):
        return value
    if value.ndim == 0:
        return value.item()
    return value if value.dtype.kind == "f" else value.reshape(-1).tolist()
