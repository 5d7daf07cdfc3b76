"""Running a Core ML program in NumPy, operation by operation.

What a run proves depends on the precision:

``fp16``
    The output of every operation is rounded once to the type the program declares (float16 for most
    of an iOS 18 program). Inside an operation values are float32 and sums float64, so that a
    rounded sum does not depend on the order of its terms. This shows what the saved file computes:
    that conversion, compression, states and integer logic are right, and that the range of float16
    suffices (an overflow becomes an infinity here too).
``fp32``
    Only the weights are float16: they keep their stored values. Everything else, states included,
    is float32. Compared with the original model in float32, this shows that the graph is the same
    function, free of rounding.

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
    """One call of a kernel.

    It takes the values ``reads`` and constant ``parameters``, and gives ``writes``. ``rounds``:
    whether float16 results are rounded. ``frees``: names that are dropped afterwards.
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
        typed = list[Any]()
        for value, (_, kind) in zip(results, self.writes, strict=True):
            typed.append(self._typed(value, kind))
        return typed

    def _typed(self, value: Any, kind: TensorType) -> Any:
        """A result in its declared type."""
        assert kind.dtype is not None
        if self.rounds and kind.dtype.name == "float16":
            return round_half(value)
        if value.dtype == kind.dtype.held:
            return value
        return value.astype(kind.dtype.held)


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled function.

    ``constants``: the constants and decompressed weights that it reads, floats as float32.
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
            found = self.package.function(function)
            with np.errstate(all="ignore"):
                compiler = _Compiler(found, self.package, self._shared, self.precision)
                self._plans[function] = compiler.compile()
        return self._plans[function]

    def make_state(self, function: str = "") -> State:
        """Zeroed states of a function, of the first one by default.

        Functions that share states declare the same ones.
        """
        if not function:
            function = next(iter(self.package.functions))
        state = State()
        for name, kind in self.package.function(function).inputs:
            if kind.state and kind.dtype is not None:
                state[name] = np.zeros(kind.shape, kind.dtype.held)
        return state

    def run(
        self,
        function: str,
        inputs: Mapping[str, Array],
        state: State | None = None,
        observe: Observer | None = None,
    ) -> dict[str, Array]:
        """Outputs of one call by name, in their declared types.

        In precision "fp32" floats are float32. ``inputs`` and ``state``: all that the function
        declares, with its shapes. ``state`` is updated in place; after an error its contents are
        undefined. ``observe`` is called with every operation and its outputs.

        The first call of a function checks every result against its declared shape and type. Raises
        ExecutionError, which names function, operation and output.
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
                    raise ExecutionError(
                        f"function {function!r}, {operation.kind} {operation.output!r}: {error}"
                    ) from error
                if observe is not None:
                    outputs = [np.asarray(values[name]) for name, _ in operation.outputs]
                    observe(operation, tuple(outputs))
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
            if kind.dtype.name == "float16" and self.precision == FP16:
                return round_half(value)
            return value
        if not np.array_equal(value.ravel(), array.ravel()):
            raise InputError(f"an input is {array.dtype}, its values do not fit {kind.dtype.name}")
        return value

    def _output(self, value: Any, kind: TensorType) -> Array:
        """An output as callers get it."""
        assert kind.dtype is not None
        dtype = kind.dtype.storage if self.precision == FP16 else kind.dtype.held
        return np.array(value, dtype).reshape(kind.shape)


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
                raise UnsupportedOpError(
                    f"{where}: operation {operation.kind!r} is not supported by the interpreter; "
                    "export the bundle again if the package was edited, otherwise run it on a Mac"
                )
            elif kernel.weight:
                self._decompress(self._step(operation, kernel, where), where)
            else:
                steps.append(self._step(operation, kernel, where))
        for step in steps:
            for name in step.reads:
                self._constant(name)
        for name in self._function.outputs:
            self._constant(name)
        kept = {name for name, kind in self._function.inputs if kind.state}
        kept.update(self._function.outputs)
        return Plan(self._function, _with_frees(steps, kept), self._known)

    def _state_step(self, operation: Operation, where: str) -> Step:
        """A step that reads or writes a state."""
        given = [*operation.inputs.get("input", ()), *operation.inputs.get("data", ())]
        states = {name: kind for name, kind in self._function.inputs if kind.state}
        expected = 1 if operation.kind == READ_STATE else 2
        if len(given) != expected or given[0] not in states:
            raise ExecutionError(
                f"{where}: it takes a state of the function, and one value to write"
            )
        state = given[0]
        if operation.kind == READ_STATE:
            return Step(operation, SAME, (state,), {}, operation.outputs, rounds=False)
        written = given[1]
        return Step(operation, SAME, (written,), {}, ((state, states[state]),), rounds=False)

    def _step(self, operation: Operation, kernel: Kernel, where: str) -> Step:
        """A step of one kernel."""
        reads: list[str] = []
        operands = set[str]()
        for operand in kernel.operands:
            name = operand.rstrip("?*")
            operands.add(name)
            if name not in operation.inputs and not operand.endswith("?"):
                raise ExecutionError(f"{where}: parameter {name!r} is missing")
            reads += operation.inputs.get(name, ())
        parameters = {}
        for name in operation.inputs.keys() - operands:
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
        [(name, kind)] = step.writes

        def make() -> Array:
            try:
                operands = [_widened(self._package.constant(value)) for value in stored]
                [result] = step.run(operands)
            except FAILURES as error:
                raise ExecutionError(f"{where}: {error}") from error
            return np.asarray(result)

        key = (step.operation.kind, kind, *map(_origin, stored))
        array = self._made(key, make)
        self._known[name] = array
        check_type(array, kind, where)

    def _constant(self, name: str) -> Constant | None:
        """A constant or decompressed weight; None for what is only known at run time."""
        if name in self._known:
            return self._known[name]
        value = self._function.constants.get(name)
        if value is None:
            return None
        if isinstance(value.data, str):
            return value.data
        array = self._made(_origin(value), lambda: self._package.constant(value))
        self._known[name] = array
        return array

    def _made(self, key: Hashable, make: Callable[[], Array]) -> Array:
        """The array of this origin, made if no function has it yet."""
        if key not in self._shared:
            self._shared[key] = _widened(make()).view()
            self._shared[key].flags.writeable = False
        return self._shared[key]


def _origin(value: Value) -> Hashable:
    """What is equal for constants with equal contents."""
    if isinstance(value.data, np.ndarray):
        return value.type, value.data.tobytes()
    return value.type, value.data


def _widened(array: Array) -> Array:
    """Floats as float32, other values as they are."""
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    return array


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
