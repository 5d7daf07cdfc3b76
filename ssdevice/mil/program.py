"""Running a Core ML program in NumPy, operation by operation.

What a run proves depends on the precision:

``fp16``
    The output of every operation is rounded once to the type the program declares (float16 for most
    of an iOS 18
    program). Inside an operation values are float32 and sums float64, so that a rounded sum does
    not depend on the
    order of its terms. This shows what the saved file computes: that conversion, compression,
    states and integer
    logic are right and that the range of float16 suffices (an overflow becomes an infinity here
    too).
``fp32``
    Only the weights are float16: they keep their stored values. Everything else, states included,
    is float32.
    Compared with the original model in float32, this shows that the graph is the same function,
    free of rounding.

Neither shows what a device's runtime does inside an operation: the order and width of its sums,
which operations it fuses or splits, how it approximates exp or tanh, and what runs on the Neural
Engine. Equal tokens here do not promise equal bits there.

A function is compiled to a flat list of steps; values are dropped after their last use. A step
calls a kernel on named values and stores the results by name. No kernel writes into its operands,
so values may share memory. A state is a name for a value; writing it gives the name another value.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ssdevice.errors import InputError
from ssdevice.mil.operations import (
    KERNELS,
    Constant,
    ExecutionError,
    Kernel,
    UnsupportedOpError,
    plain,
)
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import Function, Operation, TensorType, Value
from ssdevice.mil.weights import Array

FP16 = "fp16"
FP32 = "fp32"
PRECISIONS = (FP16, FP32)

READ_STATE = "read_state"
WRITE_STATE = "write_state"
SAME = Kernel(lambda value: value, (), frozenset(), exact=True)
FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    ExecutionError,
)
"""What kernels raise for values that do not fit."""
Observer = Callable[[Operation, tuple[Array, ...]], None]
State = dict[str, Array]
"""The states of a program between runs by name, zero at first.

Floating-point states are held as float32.
"""


@dataclass(frozen=True, eq=False)
class Step:
    """One call: ``kernel`` takes the values ``reads`` and constant ``parameters``, and gives
    ``writes``.

    ``rounds``: whether float16 results are rounded. ``frees``: names that are dropped afterwards.
    """

    operation: Operation
    kernel: Kernel
    reads: tuple[str, ...]
    parameters: dict[str, Any]
    writes: tuple[tuple[str, TensorType], ...]
    rounds: bool
    frees: tuple[str, ...] = ()

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The results in their declared types, floats as float32."""
        if self.kernel.sums:
            operands = [x.astype(np.float64) if x.dtype == np.float32 else x for x in operands]
        result = self.kernel.function(*operands, **self.parameters)
        results = result if len(self.writes) > 1 else (result,)
        return [
            self._typed(value, kind) for value, (_, kind) in zip(results, self.writes, strict=True)
        ]

    def _typed(self, value: Any, kind: TensorType) -> Any:
        assert kind.dtype is not None
        if self.rounds and kind.dtype.name == "float16":
            return round_half(value)
        return value if value.dtype == kind.dtype.held else value.astype(kind.dtype.held)


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled function.

    ``constants``: those that it reads and decompressed weights, floats as float32.
    """

    function: Function
    steps: tuple[Step, ...]
    constants: dict[str, Array]


class Program:
    """A package ready to run in one precision ("fp16" or "fp32").

    Functions are compiled on first use.
    """

    def __init__(self, package: Package, precision: str = FP16) -> None:
        if precision not in PRECISIONS:
            raise InputError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
        self.package = package
        self.path = package.path
        self.precision = precision
        self._shared: dict[Hashable, Array] = {}
        self._plans: dict[str, Plan] = {}
        self._checked: set[str] = set()

    def plan(self, function: str) -> Plan:
        """The compiled function. Raises UnsupportedOpError for an operation without a kernel."""
        if function not in self._plans:
            with np.errstate(all="ignore"):
                compiler = _Compiler(
                    self.package.function(function), self.package, self._shared, self.precision
                )
                self._plans[function] = compiler.compile()
        return self._plans[function]

    def make_state(self, function: str = "") -> State:
        """Zeroed states of a function, of the first one by default; functions that share them
        declare the same.
        """
        inputs = self.package.function(function or next(iter(self.package.functions))).inputs
        return {
            name: np.zeros(kind.shape, kind.dtype.held)
            for name, kind in inputs
            if kind.state and kind.dtype
        }

    def run(
        self,
        function: str,
        inputs: Mapping[str, Array],
        state: State | None = None,
        observe: Observer | None = None,
    ) -> dict[str, Array]:
        """Outputs of one call by name, in their declared types (float32 for floats in precision
        "fp32").

        ``inputs`` and ``state``: all that the function declares, with its shapes. ``state`` is
        updated in place; after an error its contents are undefined. ``observe`` is called with
        every operation and its outputs. The first call of a function checks every result against
        its declared shape and type. Raises ExecutionError, which names function, operation and
        output.
        """
        plan = self.plan(function)
        values: dict[str, Any] = {**plan.constants, **(state or {})}
        for name, kind in plan.function.inputs:
            if not kind.state:
                values[name] = self._input(np.asarray(inputs[name]), kind)
        with np.errstate(all="ignore"):
            for step in plan.steps:
                operation = step.operation
                try:
                    results = step.run([values[name] for name in step.reads])
                    for value, (name, kind) in zip(results, step.writes, strict=True):
                        if function not in self._checked:
                            check_type(value, kind, f"output {name!r}")
                        values[name] = value
                except FAILURES as error:
                    where = f"function {function!r}, {operation.kind} {operation.output!r}"
                    raise ExecutionError(f"{where}: {error}") from error
                if observe is not None:
                    observe(
                        operation, tuple(np.asarray(values[name]) for name, _ in operation.outputs)
                    )
                for name in step.frees:
                    del values[name]
        self._checked.add(function)
        if state is not None:
            state.update((name, values[name]) for name, kind in plan.function.inputs if kind.state)
        return {
            name: self._output(values[name], plan.function.types[name])
            for name in plan.function.outputs
        }

    def _input(self, array: Array, kind: TensorType) -> Array:
        """An input in the form that kernels take.

        Raises InputError for values that its type does not hold.
        """
        assert kind.dtype is not None
        if array.size != kind.count:
            raise InputError(
                f"an input has {array.size} values, the program takes {list(kind.shape)}"
            )
        value = array.astype(kind.dtype.held).reshape(kind.shape)
        if kind.dtype.floating:
            return (
                round_half(value)
                if kind.dtype.name == "float16" and self.precision == FP16
                else value
            )
        if not np.array_equal(value.ravel(), array.ravel()):
            raise InputError(f"an input is {array.dtype}, its values do not fit {kind.dtype.name}")
        return value

    def _output(self, value: Any, kind: TensorType) -> Array:
        assert kind.dtype is not None
        return np.array(
            value, kind.dtype.storage if self.precision == FP16 else kind.dtype.held
        ).reshape(kind.shape)


class _Compiler:
    """Compiles one function for one precision.

    ``shared``: arrays of all functions by origin: a place in the weight file, contents, or a
    decompression.
    """

    def __init__(
        self, function: Function, package: Package, shared: dict[Hashable, Array], precision: str
    ) -> None:
        self._function = function
        self._package = package
        self._shared = shared
        self._half = precision == FP16
        self._known: dict[str, Array] = {}

    def compile(self) -> Plan:
        """The plan.

        Raises UnsupportedOpError, which names function and operation, for a missing kernel.
        """
        steps = []
        for operation in self._function.operations:
            where = f"function {self._function.name!r}, {operation.kind} {operation.output!r}"
            kernel = KERNELS.get(operation.kind)
            if operation.kind in (READ_STATE, WRITE_STATE):
                steps.append(self._state_step(operation, where))
            elif kernel is None:
                what = f"operation {operation.kind!r} is not supported by the interpreter"
                how = "export the bundle again if the package was edited, otherwise run it on a Mac"
                raise UnsupportedOpError(f"{where}: {what}; {how}")
            elif kernel.weight:
                self._decompress(self._step(operation, kernel, where), where)
            else:
                steps.append(self._step(operation, kernel, where))
        for name in (*(name for step in steps for name in step.reads), *self._function.outputs):
            self._constant(name)
        states = {name for name, kind in self._function.inputs if kind.state}
        return Plan(
            self._function, _with_frees(steps, {*states, *self._function.outputs}), self._known
        )

    def _state_step(self, operation: Operation, where: str) -> Step:
        given = [name for key in ("input", "data") for name in operation.inputs.get(key, ())]
        state = {
            name: kind for name, kind in self._function.inputs if kind.state and name in given[:1]
        }
        if not state or len(given) != (1 if operation.kind == READ_STATE else 2):
            raise ExecutionError(
                f"{where}: it takes a state of the function, and one value to write"
            )
        writes = operation.outputs if operation.kind == READ_STATE else tuple(state.items())
        return Step(operation, SAME, (given[-1],), {}, writes, False)

    def _step(self, operation: Operation, kernel: Kernel, where: str) -> Step:
        reads: list[str] = []
        for operand in kernel.operands:
            name = operand.rstrip("?*")
            if name not in operation.inputs and not operand.endswith("?"):
                raise ExecutionError(f"{where}: parameter {name!r} is missing")
            reads += operation.inputs.get(name, ())
        parameters = {}
        for name in operation.inputs.keys() - {operand.rstrip("?*") for operand in kernel.operands}:
            sources = operation.inputs[name]
            value = self._constant(sources[0]) if len(sources) == 1 else None
            if name not in kernel.parameters or value is None:
                when = "" if value is not None else " that is not a constant"
                raise UnsupportedOpError(f"{where}: a parameter {name!r}{when} is not supported")
            parameters[name] = plain(value)
        if any(kind.dtype is None for _, kind in operation.outputs):
            raise UnsupportedOpError(f"{where}: an output that is a string")
        rounds = not kernel.exact and (self._half or kernel.weight)
        return Step(operation, kernel, tuple(reads), parameters, operation.outputs, rounds)

    def _decompress(self, step: Step, where: str) -> None:
        """Make a weight, once for all functions that store it alike."""
        constants = self._function.constants
        stored = [constants[name] for name in step.reads if name in constants]
        if len(stored) < len(step.reads) or len(step.writes) != 1:
            raise UnsupportedOpError(f"{where}: a weight that is not made of stored constants")
        ((name, kind),) = step.writes

        def make() -> Array:
            try:
                return np.asarray(
                    step.run([_widened(self._package.constant(value)) for value in stored])[0]
                )
            except FAILURES as error:
                raise ExecutionError(f"{where}: {error}") from error

        self._known[name] = array = self._made(
            (step.operation.kind, kind, *map(_origin, stored)), make
        )
        check_type(array, kind, where)

    def _constant(self, name: str) -> Constant | None:
        """A constant or decompressed weight; None for what is only known at run time."""
        if (value := self._function.constants.get(name)) is None or name in self._known:
            return self._known.get(name)
        if isinstance(value.data, str):
            return value.data
        self._known[name] = array = self._made(
            _origin(value), lambda: self._package.constant(value)
        )
        return array

    def _made(self, key: Hashable, make: Callable[[], Array]) -> Array:
        if key not in self._shared:
            self._shared[key] = _widened(make()).view()
            self._shared[key].flags.writeable = False
        return self._shared[key]


def _origin(value: Value) -> Hashable:
    """Equal for constants with equal contents."""
    return value.type, value.data.tobytes() if isinstance(value.data, np.ndarray) else value.data


def _widened(array: Array) -> Array:
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array


def round_half(value: Any) -> Array:
    """Values rounded to the nearest float16 (ties to even), stored as float32."""
    rounded: Array = value.astype(np.float16).astype(np.float32)
    return rounded


def check_type(value: Any, kind: TensorType, where: str) -> None:
    """Raise ExecutionError if an array does not have the declared shape and type."""
    shape = np.shape(value)
    # A scalar may be declared as a vector of one element, and vice versa.
    if shape != kind.shape and not (np.size(value) == 1 == kind.count):
        raise ExecutionError(
            f"{where}: its result has shape {list(shape)}, the program declares {list(kind.shape)}"
        )
    if kind.dtype is not None and np.asarray(value).dtype != kind.dtype.held:
        raise ExecutionError(
            f"{where}: its result is {np.asarray(value).dtype}, declared {kind.dtype.name}"
        )


def _with_frees(steps: list[Step], kept: set[str]) -> tuple[Step, ...]:
    """The steps, each with the values that no later step reads."""
    finished: list[Step] = []
    for step in reversed(steps):
        frees = {*step.reads, *(name for name, _ in step.writes)} - kept
        kept |= frees
        finished.append(replace(step, frees=tuple(frees)))
    return tuple(reversed(finished))
