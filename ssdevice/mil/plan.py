"""A function compiled to a flat list of steps: constants folded, dead values freed, updates in place where safe.

A step calls a kernel on named values, stores the results by name and drops what is not read again. Kernels declare
whether they return views, so the compiler knows which values share memory. A cache update writes into the state's own
buffer once no later operation can read the old contents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from ssdevice.mil import (  # noqa: F401  (imported for the kernels they register)
    ops_constexpr,
    ops_elementwise,
    ops_index,
    ops_linear,
    ops_reduction,
    ops_shape,
)
from ssdevice.mil.constants import ConstantPool
from ssdevice.mil.dtypes import Array
from ssdevice.mil.registry import KERNELS, Constant, ExecutionError, Kernel, Node, UnsupportedOpError
from ssdevice.mil.schema import Argument, Function, Operation, TensorType, Value

FP16 = "fp16"
FP32 = "fp32"
PRECISIONS = (FP16, FP32)

CONST = "const"
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
    """A compiled function.

    ``constants``: every constant and decompressed weight by name, floats as float32. ``types``: declared type of
    every value.
    """

    function: Function
    steps: tuple[Step, ...]
    constants: dict[str, Array]
    types: dict[str, TensorType]


class Compiler:
    """Compiles one function for one precision; ``compile`` is called once."""

    def __init__(self, function: Function, pool: ConstantPool, precision: str) -> None:
        self._function = function
        self._pool = pool
        self._half = precision == FP16
        self._types = dict(function.inputs)
        self._constants: dict[str, Constant] = {}
        self._keys: dict[str, Hashable] = {}  # constant -> its key in the pool
        self._buffers: dict[str, int] = {}  # value (neither constant nor state) -> the buffer it lies in
        self._held: dict[str, int] = {}  # state -> its buffer at this point of the function
        self._owned: set[int] = set()  # buffers that a run may write into
        self._numbers = count()
        self._steps: list[Step] = []
        self._last: dict[str, float] = {}  # name -> position of its last read; infinite for outputs
        for position, operation in enumerate(function.operations):
            self._last.update(dict.fromkeys(operation.names(), position))
        self._last.update(dict.fromkeys(function.outputs, math.inf))

    def compile(self) -> Plan:
        """The plan. Raises UnsupportedOpError, which names function and operation, for a missing kernel."""
        for name, kind in self._function.inputs:
            if kind.state:
                self._held[name] = self._new_buffer()
            else:
                self._buffers[name] = next(self._numbers)
        for position, operation in enumerate(self._function.operations):
            self._types.update(operation.outputs)
            if operation.kind == CONST:
                value = operation.attributes.get("val")
                if value is None:
                    raise ExecutionError(f"{self._where(operation)}: a constant without a value")
                self._define_constant(operation.output, *self._literal(value))
            elif operation.kind in (READ_STATE, WRITE_STATE):
                self._add_state(operation)
            else:
                self._add_kernel(position, operation)
        arrays = {name: value for name, value in self._constants.items() if not isinstance(value, str)}
        kept = {*self._held, *self._function.outputs}
        return Plan(self._function, _with_frees(self._steps, kept), arrays, self._types)

    def _new_buffer(self) -> int:
        buffer = next(self._numbers)
        self._owned.add(buffer)
        return buffer

    def _literal(self, value: Value) -> tuple[Constant, Hashable]:
        return self._pool.load(value), self._pool.key(value)

    def _define_constant(self, name: str, value: Constant, key: Hashable) -> None:
        self._constants[name], self._keys[name] = value, key

    def _add_state(self, operation: Operation) -> None:
        """A state is a name for a buffer, and a write only changes the buffer; data is copied if it is not ours."""
        name = _argument(operation, "input")
        if name not in self._held:
            raise ExecutionError(f"{self._where(operation)}: {name!r} is not a state of the function")
        if operation.kind == WRITE_STATE:
            source = _argument(operation, "data")
            buffer = self._buffers.get(source)
            others = [held for state, held in self._held.items() if state != name]
            if buffer is not None and buffer in self._owned and buffer not in others:
                self._held[name] = buffer
                self._steps.append(Step(_same, (source,), (name,), operation))
            else:
                self._held[name] = self._new_buffer()
                self._steps.append(Step(np.array, (source,), (name,), operation))
        for output, _ in operation.outputs:
            self._buffers[output] = self._held[name]
            self._steps.append(Step(_same, (name,), (output,), operation))

    def _add_kernel(self, position: int, operation: Operation) -> None:
        kernel = KERNELS.get(operation.kind)
        if kernel is None or operation.blocks:
            raise UnsupportedOpError(
                f"{self._where(operation)}: operation {operation.kind!r} is not supported by the interpreter; "
                f"export the bundle again if the package was edited, otherwise run it on a Mac"
            )
        node = self._node(operation)
        run = _on_wide(kernel.build(node)) if kernel.sums else kernel.build(node)
        sources = self._sources(operation, kernel)
        finish = [self._finish(kind, kernel, node) for _, kind in operation.outputs]
        if all(source in self._constants for source in sources):
            self._fold(operation, _finished(_on_copy(run) if kernel.updates else run, finish), sources)
            return
        if kernel.updates and not self._may_overwrite(position, sources):
            run = _on_copy(run)
        for name, _ in operation.outputs:
            shared = self._buffers.get(sources[0], next(self._numbers)) if kernel.view else None
            self._buffers[name] = self._new_buffer() if shared is None else shared
        writes = tuple(name for name, _ in operation.outputs)
        self._steps.append(Step(_finished(run, finish), tuple(sources), writes, operation))

    def _node(self, operation: Operation) -> Node:
        constants: dict[str, list[Constant | None]] = {}
        for name, value in operation.attributes.items():
            if name != "name":
                constants[name] = [self._pool.load(value)]
        for name, arguments in operation.inputs.items():
            constants[name] = [self._known(argument)[0] for argument in arguments]
        return Node(self._where(operation), tuple(kind for _, kind in operation.outputs), constants)

    def _known(self, argument: Argument) -> tuple[Constant | None, Hashable]:
        """Value and key of a constant; None for a value that is only known at run time."""
        if isinstance(argument, str):
            return self._constants.get(argument), self._keys.get(argument)
        return self._literal(argument)

    def _sources(self, operation: Operation, kernel: Kernel) -> list[str]:
        """The names of the operands in order. Inline constants are given a name."""
        sources = []
        for operand in kernel.operands:
            name = operand.rstrip("?*")
            arguments: Sequence[Argument] = operation.inputs.get(name, ())
            if not arguments and name in operation.attributes:
                arguments = (operation.attributes[name],)
            if not arguments and not operand.endswith("?"):
                raise ExecutionError(f"{self._where(operation)}: parameter {name!r} is missing")
            for argument in arguments:
                if isinstance(argument, Value):
                    unique = f"{operation.output}.{name}.{next(self._numbers)}"
                    self._define_constant(unique, *self._literal(argument))
                    argument = unique
                sources.append(argument)
        return sources

    def _finish(self, kind: TensorType, kernel: Kernel, node: Node) -> Run | None:
        """The conversion of an output to its declared type; None if the kernel's result already has it."""
        exact = (kernel.exact or kernel.view or kernel.updates) if node.exact is None else node.exact
        if kind.dtype is None:
            raise UnsupportedOpError(f"{node.where}: an output that is a string")
        if kind.dtype.name == "float16" and not exact and (self._half or kernel.weight):
            return round_half
        if kernel.view or kernel.updates:
            return None
        storage = np.dtype(np.float32) if kind.dtype.floating else kind.dtype.storage
        return lambda value: value if value.dtype == storage else value.astype(storage)

    def _fold(self, operation: Operation, run: Run, sources: list[str]) -> None:
        parameters: list[Hashable] = [operation.kind, len(operation.outputs), *(kind for _, kind in operation.outputs)]
        for name, arguments in sorted(operation.inputs.items()):
            parameters.append((name, *(self._known(argument)[1] for argument in arguments)))
        for name, value in sorted(operation.attributes.items()):
            if name != "name":
                parameters.append((name, self._pool.key(value)))
        key = tuple(parameters)
        try:
            result = self._pool.fold(key, lambda: run(*[self._constants[source] for source in sources]))
        except (ArithmeticError, IndexError, MemoryError, TypeError, ValueError, ExecutionError) as error:
            raise ExecutionError(f"{self._where(operation)}: {error}") from error
        results = result if len(operation.outputs) > 1 or isinstance(result, tuple) else (result,)
        for index, ((name, kind), value) in enumerate(zip(operation.outputs, results, strict=True)):
            check_type(value, kind, self._where(operation))
            self._define_constant(name, value, (key, index))

    def _may_overwrite(self, position: int, sources: list[str]) -> bool:
        """Whether an update may write into its first operand: the run owns the buffer and nothing reads it later."""
        buffer = self._buffers.get(sources[0])
        if buffer not in self._owned or any(self._buffers.get(source) == buffer for source in sources[1:]):
            return False
        if any(self._last.get(name, -1) > position for name, at in self._buffers.items() if at == buffer):
            return False
        states = [state for state, held in self._held.items() if held == buffer]
        return all(next(self._uses(state, position), None) == WRITE_STATE for state in states)

    def _uses(self, name: str, position: int) -> Iterator[str]:
        """Kinds of the operations after ``position`` that read or write a state."""
        for operation in self._function.operations[position + 1 :]:
            if name in operation.names():
                yield operation.kind

    def _where(self, operation: Operation) -> str:
        return f"function {self._function.name!r}, {operation.kind} {operation.output!r}"


def round_half(value: Any) -> Array:
    """Values rounded to the nearest float16 (ties to even), stored as float32."""
    rounded: Array = value.astype(np.float16).astype(np.float32)
    return rounded


def check_type(value: Any, kind: TensorType, where: str) -> None:
    """Raise ExecutionError if an array does not have the declared shape and type."""
    shape = np.shape(value)
    fits = len(shape) == len(kind.shape) and all(b is None or a == b for a, b in zip(shape, kind.shape, strict=True))
    # A scalar may be declared as a vector of one element, and vice versa.
    if not fits and not (math.prod(shape) == 1 == kind.count):
        raise ExecutionError(f"{where}: its result has shape {list(shape)}, the program declares {list(kind.shape)}")
    if kind.dtype is not None:
        expected = np.dtype(np.float32) if kind.dtype.floating else kind.dtype.storage
        if np.asarray(value).dtype != expected:
            raise ExecutionError(f"{where}: its result is {np.asarray(value).dtype}, declared {kind.dtype.name}")


def _same(value: Any) -> Any:
    return value


def _on_wide(run: Run) -> Run:
    single = np.float32
    return lambda *operands: run(*[x.astype(np.float64) if x.dtype == single else x for x in operands])


def _on_copy(run: Run) -> Run:
    return lambda data, *rest: run(data.copy(), *rest)


def _finished(run: Run, finish: list[Run | None]) -> Run:
    """``run`` with each output converted to its declared type."""
    if not any(finish):
        return run
    if len(finish) == 1:
        return lambda *operands: finish[0](run(*operands))  # type: ignore[misc]
    return lambda *operands: [
        value if one is None else one(value) for one, value in zip(finish, run(*operands), strict=True)
    ]


def _with_frees(steps: list[Step], kept: set[str]) -> tuple[Step, ...]:
    """The steps, each with the values that no later step reads."""
    seen = set(kept)
    finished = []
    for step in reversed(steps):
        frees = tuple({name for name in (*step.reads, *step.writes) if name not in seen})
        seen.update(frees)
        finished.append(replace(step, frees=frees))
    return tuple(reversed(finished))


def _argument(operation: Operation, name: str) -> str:
    arguments = operation.inputs.get(name, ())
    if len(arguments) != 1 or not isinstance(arguments[0], str):
        raise ExecutionError(f"{operation.kind} {operation.output!r}: parameter {name!r} does not name one value")
    return arguments[0]
