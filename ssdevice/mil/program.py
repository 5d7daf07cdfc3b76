"""Running a Core ML program in NumPy, operation by operation.

What a run proves depends on the precision:

``fp16``
    The output of every operation is rounded once to the type the program declares (float16 for most of an iOS 18
    program). Inside an operation values are float32 and sums float64, so that a rounded sum does not depend on the
    order of its terms. This shows what the saved file computes: that conversion, compression, states and integer
    logic are right and that the range of float16 suffices (an overflow becomes an infinity here too).
``fp32``
    Only the weights are float16: they keep their stored values. Everything else, states included, is float32.
    Compared with the original model in float32, this shows that the graph is the same function, free of rounding.

Neither shows what a device's runtime does inside an operation: the order and width of its sums, which operations
it fuses or splits, how it approximates exp or tanh, and what runs on the Neural Engine. Equal tokens here do not
promise equal bits there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ssdevice.errors import InputError
from ssdevice.mil.dtypes import Array
from ssdevice.mil.operations import ExecutionError
from ssdevice.mil.plan import FP16, PRECISIONS, Compiler, ConstantPool, Plan, check_type, round_half
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import Operation, TensorType

Observer = Callable[[Operation, tuple[Array, ...]], None]
_FAILURES = (ArithmeticError, AttributeError, IndexError, MemoryError, TypeError, ValueError, ExecutionError)


State = dict[str, Array]
"""The states of a program between runs by name, zero at first. Floating-point states are held as float32."""


class Program:
    """A package ready to run in one precision ("fp16" or "fp32"). Functions are compiled on first use."""

    def __init__(self, package: Package, precision: str = FP16) -> None:
        if precision not in PRECISIONS:
            raise InputError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
        self.package, self.path = package, package.path
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

    def make_state(self, function: str = "") -> State:
        """Zeroed states of a function, of the first one by default; functions that share them declare the same."""
        inputs = self.package.function(function or next(iter(self.package.functions))).inputs
        return {name: np.zeros(kind.shape, kind.dtype.held) for name, kind in inputs if kind.state and kind.dtype}

    def run(
        self,
        function: str,
        inputs: Mapping[str, Array],
        state: State | None = None,
        observe: Observer | None = None,
    ) -> dict[str, Array]:
        """Outputs of one call by name, in their declared types (float32 for floats in precision "fp32").

        ``inputs`` and ``state``: all that the function declares, with its shapes. ``state`` is updated in place; after
        an error its contents are undefined. ``observe`` is called with every operation and its outputs. The first call
        of a function checks every result against its declared shape and type. Raises ExecutionError, which names
        function, operation and output.
        """
        plan = self.plan(function)
        values: dict[str, Any] = {**plan.constants, **(state or {})}
        for name, kind in plan.function.inputs:
            if not kind.state:
                values[name] = self._input(np.asarray(inputs[name]), kind)
        check = function not in self._checked
        step = None
        try:
            with np.errstate(all="ignore"):
                for step in plan.steps:
                    result = step.run(*[values[name] for name in step.reads])
                    values.update(zip(step.writes, result if len(step.writes) > 1 else (result,), strict=True))
                    outputs = step.operation.outputs
                    if check:
                        for name, kind in outputs:
                            check_type(values[name], kind, f"output {name!r}")
                    if observe is not None:
                        observe(step.operation, tuple(np.asarray(values[name]) for name, _ in outputs))
                    for name in step.frees:
                        del values[name]
        except _FAILURES as error:
            assert step is not None
            where = f"function {function!r}, {step.operation.kind} {step.operation.output!r}"
            raise ExecutionError(f"{where}: {error}") from error
        self._checked.add(function)
        if state is not None:
            state.update((name, values[name]) for name, kind in plan.function.inputs if kind.state)
        return {name: self._output(values[name], plan.function.types[name]) for name in plan.function.outputs}

    def _input(self, array: Array, kind: TensorType) -> Array:
        """An input in the form that kernels take. Raises InputError for values that its type does not hold."""
        assert kind.dtype is not None
        if array.size != kind.count:
            raise InputError(f"an input has {array.size} values, the program takes {list(kind.shape)}")
        value = array.astype(kind.dtype.held).reshape(kind.shape)
        if kind.dtype.floating:
            return round_half(value) if kind.dtype.name == "float16" and self.precision == FP16 else value
        if not np.array_equal(value.ravel(), array.ravel()):
            raise InputError(f"an input is {array.dtype}, its values do not fit {kind.dtype.name}")
        return value

    def _output(self, value: Any, kind: TensorType) -> Array:
        assert kind.dtype is not None
        dtype = kind.dtype.storage if self.precision == FP16 else kind.dtype.held
        return np.array(value, dtype).reshape(kind.shape)
