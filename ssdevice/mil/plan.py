"""A function compiled to a flat list of steps: weights decompressed, values dropped after their last use.

A step calls a kernel on named values and stores the results by name. No kernel writes into its operands, so values may
share memory. A state is a name for a value, which a write exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ssdevice.mil.dtypes import Array
from ssdevice.mil.operations import KERNELS, Constant, ExecutionError, Kernel, UnsupportedOpError, plain
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import CONST, Function, Operation, TensorType, Value

FP16 = "fp16"
FP32 = "fp32"
PRECISIONS = (FP16, FP32)

READ_STATE = "read_state"
WRITE_STATE = "write_state"
Run = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Step:
    """One call: ``run`` takes the values ``reads`` and returns ``writes``; ``frees`` are dropped afterwards."""

    run: Run
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    operation: Operation
    frees: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled function. ``constants``: the constants and decompressed weights it needs, floats as float32."""

    function: Function
    steps: tuple[Step, ...]
    constants: dict[str, Array]


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


class Compiler:
    """Compiles one function for one precision; ``compile`` is called once."""

    def __init__(self, function: Function, pool: ConstantPool, precision: str) -> None:
        self._function = function
        self._pool = pool
        self._half = precision == FP16
        self._constants: dict[str, Constant] = {}
        self._steps: list[Step] = []

    def compile(self) -> Plan:
        """The plan. Raises UnsupportedOpError, which names function and operation, for a missing kernel."""
        function = self._function
        states = {name for name, kind in function.inputs if kind.state}
        for operation in function.operations:
            if operation.kind in (READ_STATE, WRITE_STATE):
                self._add_state(operation, states)
            elif operation.kind != CONST:
                self._add_kernel(operation)
        for name in function.outputs:
            self._constant(name)
        arrays = {name: value for name, value in self._constants.items() if not isinstance(value, str)}
        return Plan(function, _with_frees(self._steps, {*states, *function.outputs}), arrays)

    def _constant(self, name: str) -> Constant | None:
        """A constant or decompressed weight; None for a value that is only known at run time."""
        stored = self._function.constants.get(name)
        if stored is not None and name not in self._constants:
            self._constants[name] = self._pool.load(stored)
        return self._constants.get(name)

    def _add_state(self, operation: Operation, states: set[str]) -> None:
        name = self._parameter(operation, "input")
        if name not in states:
            raise ExecutionError(f"{self._where(operation)}: {name!r} is not a state of the function")
        source, target = name, operation.output
        if operation.kind == WRITE_STATE:
            source, target = self._parameter(operation, "data"), name
            self._constant(source)
        self._steps.append(Step(lambda value: value, (source,), (target,), operation))

    def _add_kernel(self, operation: Operation) -> None:
        kernel = KERNELS.get(operation.kind)
        if kernel is None:
            raise UnsupportedOpError(
                f"{self._where(operation)}: operation {operation.kind!r} is not supported by the interpreter; "
                f"export the bundle again if the package was edited, otherwise run it on a Mac"
            )
        if kernel.weight:
            self._decompress(operation, kernel)
            return
        run, sources = self._run(operation, kernel), self._sources(operation, kernel)
        for name in sources:
            self._constant(name)
        self._steps.append(Step(run, tuple(sources), tuple(name for name, _ in operation.outputs), operation))

    def _run(self, operation: Operation, kernel: Kernel) -> Run:
        """The kernel's function for an operation, with outputs of their declared types."""
        where, operands = self._where(operation), [operand.rstrip("?*") for operand in kernel.operands]
        constants = {}
        for name in operation.inputs.keys() - operands:
            value = self._constant(self._parameter(operation, name))
            if name not in kernel.parameters or value is None:
                when = "" if value is not None else " that is only known at run time"
                raise UnsupportedOpError(f"{where}: a parameter {name!r}{when} is not supported")
            constants[name] = plain(value)
        run = partial(kernel.function, **constants)
        return _finished(
            _on_wide(run) if kernel.sums else run,
            [self._finish(kind, kernel, where) for _, kind in operation.outputs],
        )

    def _sources(self, operation: Operation, kernel: Kernel) -> list[str]:
        sources: list[str] = []
        for operand in kernel.operands:
            name = operand.rstrip("?*")
            if name not in operation.inputs and not operand.endswith("?"):
                raise ExecutionError(f"{self._where(operation)}: parameter {name!r} is missing")
            sources.extend(operation.inputs.get(name, ()))
        return sources

    def _finish(self, kind: TensorType, kernel: Kernel, where: str) -> Run:
        """The conversion of an output to its declared type."""
        if kind.dtype is None:
            raise UnsupportedOpError(f"{where}: an output that is a string")
        if kind.dtype.name == "float16" and not kernel.exact and (self._half or kernel.weight):
            return round_half
        held = kind.dtype.held
        return lambda value: value if value.dtype == held else value.astype(held)

    def _decompress(self, operation: Operation, kernel: Kernel) -> None:
        """Make a weight, once for all functions that store it alike; what it is made of is then not needed."""
        where, sources = self._where(operation), self._sources(operation, kernel)
        values = [self._function.constants[source] for source in sources if source in self._function.constants]
        if len(values) < len(sources) or len(operation.outputs) != 1:
            raise UnsupportedOpError(f"{where}: a weight that is not made of stored constants")
        ((name, kind),) = operation.outputs
        key: Hashable = (operation.kind, kind, *(self._pool.key(value) for value in values))

        def make() -> Any:
            run = self._run(operation, kernel)
            try:
                made = run(*[self._pool.load(value) for value in values])
            except (ArithmeticError, IndexError, MemoryError, TypeError, ValueError, ExecutionError) as error:
                raise ExecutionError(f"{where}: {error}") from error
            for value in values:
                self._pool.forget(value)
            return made

        array = self._pool.made(key, make)
        check_type(array, kind, where)
        self._constants[name] = array

    def _parameter(self, operation: Operation, name: str) -> str:
        arguments = operation.inputs.get(name, ())
        if len(arguments) != 1:
            raise ExecutionError(f"{self._where(operation)}: parameter {name!r} is missing or a tuple")
        return arguments[0]

    def _where(self, operation: Operation) -> str:
        return f"function {self._function.name!r}, {operation.kind} {operation.output!r}"


def round_half(value: Any) -> Array:
    """Values rounded to the nearest float16 (ties to even), stored as float32."""
    rounded: Array = value.astype(np.float16).astype(np.float32)
    return rounded


def check_type(value: Any, kind: TensorType, where: str) -> None:
    """Raise ExecutionError if an array does not have the declared shape and type."""
    shape = np.shape(value)
    # A scalar may be declared as a vector of one element, and vice versa.
    if shape != kind.shape and not (np.size(value) == 1 == kind.count):
        raise ExecutionError(f"{where}: its result has shape {list(shape)}, the program declares {list(kind.shape)}")
    if kind.dtype is not None and np.asarray(value).dtype != kind.dtype.held:
        raise ExecutionError(f"{where}: its result is {np.asarray(value).dtype}, declared {kind.dtype.name}")


def _on_wide(run: Run) -> Run:
    single = np.float32
    return lambda *operands: run(*[x.astype(np.float64) if x.dtype == single else x for x in operands])


def _finished(run: Run, finish: list[Run]) -> Run:
    """``run`` with each output converted to its declared type."""
    if len(finish) == 1:
        return lambda *operands: finish[0](run(*operands))
    return lambda *operands: [one(value) for one, value in zip(finish, run(*operands), strict=True)]


def _with_frees(steps: list[Step], kept: set[str]) -> tuple[Step, ...]:
    """The steps, each with the values that no later step reads."""
    seen = set(kept)
    finished = []
    for step in reversed(steps):
        frees = tuple({name for name in (*step.reads, *step.writes) if name not in seen})
        seen.update(frees)
        finished.append(replace(step, frees=frees))
    return tuple(reversed(finished))
