"""Running a Core ML program in NumPy, operation by operation.

What a run proves depends on the precision:

``fp16``
    Every output is rounded to the type the program declares (float16 for most of an iOS 18 program), once an
    operation. Sums and everything else inside one operation are float32. This shows what the saved file computes:
    that conversion, compression, states and integer logic are right and that float16 ranges suffice (an overflow
    becomes an infinity here too).
``fp32``
    Nothing is rounded to float16 except the weights, which keep their stored values; states stay float32. Compared
    with the original model in float32 this shows that the graph is the same function, free of rounding.

Neither shows what a device's runtime does inside an operation: in which order and width it adds, which operations
it fuses or splits, how it approximates exp or tanh, and which of them run on the Neural Engine. Equal tokens here
are not a promise of equal bits there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ssdevice.errors import InputError
from ssdevice.mil.constants import ConstantPool
from ssdevice.mil.dtypes import Array, DType
from ssdevice.mil.finish import check_type, round_half
from ssdevice.mil.plan import FP16, PRECISIONS, READ_STATE, WRITERS, Compiler
from ssdevice.mil.reader import Package
from ssdevice.mil.registry import KERNELS, ExecutionError
from ssdevice.mil.schema import Operation, TensorType
from ssdevice.mil.steps import Plan

Observer = Callable[[Operation, tuple[Array, ...]], None]
MAX_STATE_BYTES = 1 << 35
_FAILURES = (ArithmeticError, AttributeError, IndexError, MemoryError, TypeError, ValueError, ExecutionError)


class State:
    """The states of a program between runs, zero at first. Floating states are float32 arrays inside."""

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self._types = dict(types)
        self.arrays: dict[str, Array] = {}
        for name, kind in self._types.items():
            if kind.dtype is None or None in kind.shape:
                raise ExecutionError(f"state {name!r} has no fixed shape and type")
            if kind.count * _held_type(kind.dtype).itemsize > MAX_STATE_BYTES:
                raise ExecutionError(f"state {name!r} of shape {list(kind.shape)} is over {MAX_STATE_BYTES} bytes")
            self.arrays[name] = np.zeros([size or 0 for size in kind.shape], _held_type(kind.dtype))

    def read(self, name: str) -> Array:
        """A copy of one state in its declared type."""
        dtype = self._types[name].dtype
        assert dtype is not None
        return self.arrays[name].astype(dtype.storage)

    def write(self, name: str, array: Array) -> None:
        """Replace one state. Raises InputError if the shape differs."""
        if array.shape != self.arrays[name].shape:
            raise InputError(f"state {name!r} has shape {list(self.arrays[name].shape)}, not {list(array.shape)}")
        self.arrays[name] = array.astype(self.arrays[name].dtype)

    def copy(self) -> State:
        """An independent copy: a place to return to."""
        twin = State({})
        twin._types = self._types
        twin.arrays = {name: array.copy() for name, array in self.arrays.items()}
        return twin


class Program:
    """A package ready to run in one precision ("fp16" or "fp32"); functions are compiled when first used."""

    def __init__(self, package: Package, precision: str = FP16) -> None:
        if precision not in PRECISIONS:
            raise InputError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
        self.package = package
        self.precision = precision
        self._pool = ConstantPool(package)
        self._plans: dict[str, Plan] = {}
        self._checked: set[str] = set()

    def plan(self, function: str) -> Plan:
        """The compiled function. Raises UnsupportedOpError for an operation without a kernel."""
        if function not in self._plans:
            with np.errstate(all="ignore"):
                compiler = Compiler(self.package.function(function), self._pool, self.precision)
                self._plans[function] = compiler.compile()
        return self._plans[function]

    def make_state(self) -> State:
        """Zeroed states of all functions. Raises ExecutionError if two functions disagree about one."""
        types: dict[str, TensorType] = {}
        for function in self.package.functions.values():
            for name, kind in function.inputs:
                if kind.state and types.setdefault(name, kind) != kind:
                    raise ExecutionError(f"state {name!r} has different types in different functions")
        return State(types)

    def run(
        self,
        function: str,
        inputs: Mapping[str, Array],
        state: State | None = None,
        observe: Observer | None = None,
    ) -> dict[str, Array]:
        """Outputs of one call, by name, in their declared types (float32 for floats in precision "fp32").

        ``state`` is read and changed; after an error its contents are undefined. ``observe`` sees every operation's
        outputs, as floats in float32. The first call of a function also checks every result against its declared
        shape and type. Raises InputError for inputs that do not fit and ExecutionError, naming operation, function
        and output, for what cannot be executed.
        """
        plan = self.plan(function)
        registers = list(plan.registers)
        self._fill(plan, registers, inputs, state)
        check = function not in self._checked
        step = None
        try:
            with np.errstate(all="ignore"):
                for step in plan.steps:
                    result = step.run(*[registers[i] for i in step.reads])
                    writes = step.writes
                    if len(writes) == 1:
                        registers[writes[0]] = result
                    else:
                        for target, value in zip(writes, result, strict=True):
                            registers[target] = value
                    if check:
                        _check(step.operation, [registers[i] for i in writes], function)
                    if observe is not None and len(writes) == len(step.operation.outputs):
                        observe(step.operation, tuple(np.asarray(registers[i]) for i in writes))
                    for register in step.frees:
                        registers[register] = None
        except _FAILURES as error:
            assert step is not None
            where = f"function {function!r}, {step.operation.kind} {step.operation.output!r}"
            raise ExecutionError(f"{where}: {error}") from error
        self._checked.add(function)
        if state is not None:
            state.arrays.update((name, registers[register]) for name, (register, _) in plan.states.items())
        return {name: self._output(registers[register], kind) for name, (register, kind) in plan.outputs.items()}

    def _fill(self, plan: Plan, registers: list[Any], inputs: Mapping[str, Array], state: State | None) -> None:
        name = plan.function.name
        if inputs.keys() != plan.inputs.keys():
            wanted, given = ", ".join(sorted(plan.inputs)), ", ".join(sorted(inputs))
            raise InputError(f"function {name!r} takes {wanted or 'no inputs'}; given: {given or 'none'}")
        if plan.states and state is None:
            raise InputError(f"function {name!r} has states ({', '.join(plan.states)}): pass make_state()")
        for key, (register, kind) in plan.inputs.items():
            registers[register] = self._input(key, np.asarray(inputs[key]), kind)
        if state is not None:
            for key, (register, _) in plan.states.items():
                if key not in state.arrays:
                    raise InputError(f"the state lacks {key!r}: it was made by another program")
                registers[register] = state.arrays[key]

    def _input(self, name: str, array: Array, kind: TensorType) -> Array:
        dtype = kind.dtype
        if dtype is None:
            raise ExecutionError(f"input {name!r} is a string")
        fits = len(array.shape) == len(kind.shape) and all(
            b is None or a == b for a, b in zip(array.shape, kind.shape, strict=True)
        )
        if not fits:
            raise InputError(f"input {name!r} has shape {list(array.shape)}, expected {list(kind.shape)}")
        if dtype.floating:
            value = array.astype(np.float32)
            return round_half(value) if dtype.name == "float16" and self.precision == FP16 else value
        value = array.astype(dtype.storage)
        if array.dtype.kind == "f" or not np.array_equal(value, array):
            raise InputError(f"input {name!r} is {array.dtype}, its values do not fit {dtype.name}")
        return value

    def _output(self, value: Any, kind: TensorType) -> Array:
        assert kind.dtype is not None
        keep = kind.dtype.floating and self.precision != FP16
        shape = [own if size is None else size for size, own in zip(kind.shape, np.shape(value), strict=False)]
        return np.array(value, np.float32 if keep else kind.dtype.storage).reshape(shape)


def unsupported(package: Package) -> list[str]:
    """One line for every operation of the package that has no kernel here, found without running anything."""
    missing = []
    for function in package.functions.values():
        for operation in function.operations:
            known = operation.kind in KERNELS or operation.kind in ("const", READ_STATE, *WRITERS)
            if not known or operation.blocks:
                missing.append(f"function {function.name!r}: operation {operation.kind!r} ({operation.output!r})")
    return missing


def _held_type(dtype: DType) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.floating else dtype.storage


def _check(operation: Operation, values: list[Any], function: str) -> None:
    if len(values) == len(operation.outputs):
        for value, (name, kind) in zip(values, operation.outputs, strict=True):
            check_type(value, kind, f"output {name!r}")
