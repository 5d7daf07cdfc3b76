"""A function compiled to a flat list of steps: constants folded, dead values freed, updates in place where safe.

Values live in numbered registers. A step calls a kernel on some registers, stores the results and drops registers
that nothing reads again. Which registers share memory is known from which kernels return views, so a cache update
writes into the state's own buffer when the old value cannot be seen any more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ssdevice.export.mil.dtypes import Array, DType
from ssdevice.export.mil.reader import Package
from ssdevice.export.mil.registry import KERNELS, Constant, ExecutionError, Kernel, Node, UnsupportedOpError
from ssdevice.export.mil.schema import Function, Operation, TensorType, Value

FP16 = "fp16"
FP32 = "fp32"
PRECISIONS = (FP16, FP32)

READ_STATE = "read_state"
WRITE_STATE = "write_state"
UPDATE_STATE = "coreml_update_state"  # write_state and read_state in one; coremltools splits it when it saves
STATE_OPS = (READ_STATE, WRITE_STATE, UPDATE_STATE)
CONST = "const"

Finish = Callable[[Any], Array]


def round_half(x: Any) -> Array:
    """float32 values rounded to the nearest float16, held as float32."""
    rounded: Array = x.astype(np.float16).astype(np.float32)
    return rounded


@dataclass(frozen=True, eq=False)
class Step:
    """One call: ``run(*[registers[i] for i in reads])`` fills ``writes``; ``frees`` are dropped afterwards."""

    run: Callable[..., Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    operation: Operation


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled function: ``registers`` holds the constants; inputs, states and outputs say which registers they are."""

    function: Function
    steps: tuple[Step, ...]
    registers: tuple[Any, ...]
    inputs: dict[str, tuple[int, TensorType]]
    states: dict[str, tuple[int, TensorType]]
    outputs: tuple[tuple[str, int, TensorType], ...]


class ConstantPool:
    """Arrays of constants as kernels take them, one per weight however many functions use it.

    Floating constants become float32; everything is read-only. Folded weights are kept under a key made of what
    they were folded from.
    """

    def __init__(self, package: Package) -> None:
        self.package = package
        self._arrays: dict[Hashable, Any] = {}

    def key(self, value: Value) -> Hashable:
        """What identifies a constant's contents."""
        if isinstance(value.data, np.ndarray):
            return (str(value.data.dtype), value.data.shape, value.data.tobytes())
        return value.data if isinstance(value.data, str) else (value.data, value.type)

    def load(self, value: Value) -> Constant:
        """The constant as a string or an array; big ones are converted once."""
        if isinstance(value.data, str):
            return value.data
        if isinstance(value.data, tuple):
            return ",".join(item.data for item in value.data if isinstance(item.data, str))
        return self.fold(self.key(value), lambda: held(self.package.constant(value)))

    def fold(self, key: Hashable | None, compute: Callable[[], Any]) -> Any:
        """The value for ``key``, computed at the first request; with no key it is computed anew."""
        if key is None:
            return compute()
        if key not in self._arrays:
            self._arrays[key] = compute()
        return self._arrays[key]


def held(array: Array) -> Array:
    """An array as registers hold it: floats as float32, read-only."""
    result = np.asarray(array, np.float32) if array.dtype.kind == "f" else np.asarray(array)
    result = result.view()
    result.flags.writeable = False
    return result


@dataclass
class _Value:
    """What is known of a name while compiling: its register, its memory and, for a constant, its value and key."""

    register: int
    buffer: int
    constant: Constant | None = None
    key: Hashable | None = None


@dataclass
class Compiler:
    """Compiles one function; ``compile`` is the only entry."""

    function: Function
    pool: ConstantPool
    precision: str
    _registers: list[Any] = field(default_factory=list)
    _known: dict[str, _Value] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)  # state -> the buffer it holds now
    _owned: set[int] = field(default_factory=set)  # buffers this run may write into
    _buffers: int = 0
    _steps: list[Step] = field(default_factory=list)

    def compile(self) -> Plan:
        """The plan. Raises UnsupportedOpError naming operation, function and output for what has no kernel."""
        function = self.function
        types = dict(function.inputs)
        for name, kind in function.inputs:
            value = self._new(name)
            if kind.state:
                self._held[name] = value.buffer
                self._owned.add(value.buffer)
        self._last = _last_uses(function)
        for position, operation in enumerate(function.operations):
            types.update(operation.outputs)
            self._add(position, operation)
        slots = {name: (self._known[name].register, kind) for name, kind in function.inputs}
        outputs = tuple((name, self._known[name].register, types[name]) for name in function.outputs)
        keep = {register for _, register, _ in outputs} | {slots[name][0] for name in self._held}
        return Plan(
            function,
            _with_frees(self._steps, keep, [value is not None for value in self._registers]),
            tuple(self._registers),
            {name: slot for name, slot in slots.items() if not slot[1].state},
            {name: slot for name, slot in slots.items() if slot[1].state},
            outputs,
        )

    def _new(self, name: str, buffer: int | None = None) -> _Value:
        if buffer is None:
            buffer = self._buffers
            self._buffers += 1
        value = self._known[name] = _Value(len(self._registers), buffer)
        self._registers.append(None)
        return value

    def _new_constant(self, name: str, constant: Any, key: Hashable | None) -> None:
        value = self._new(name)
        value.constant, value.key = constant, key
        self._registers[value.register] = constant

    def _add(self, position: int, operation: Operation) -> None:
        if operation.kind == CONST:
            stored = operation.attributes.get("val")
            if stored is None:
                raise ExecutionError(f"{self._where(operation)}: a constant without a value")
            self._new_constant(operation.output, self.pool.load(stored), self.pool.key(stored))
        elif operation.kind in STATE_OPS:
            self._add_state(position, operation)
        else:
            self._add_kernel(position, operation)

    def _add_state(self, position: int, operation: Operation) -> None:
        """State operations only move references: a state's buffer changes in place or by being replaced."""
        name = operation.inputs["input" if operation.kind == READ_STATE else "state" if "state" in operation.inputs
                                else "input"][0]
        if not isinstance(name, str) or name not in self._held:
            raise ExecutionError(f"{self._where(operation)}: it names no state of the function")
        state = self._known[name]
        if operation.kind != READ_STATE:
            data = operation.inputs["value" if "value" in operation.inputs else "data"][0]
            if not isinstance(data, str):
                raise UnsupportedOpError(f"{self._where(operation)}: a constant written to a state is not supported")
            source = self._known[data]
            taken = [buffer for other, buffer in self._held.items() if other != name]
            shared = source.buffer not in self._owned or source.buffer in taken
            if shared:
                self._held[name] = self._buffers
                self._owned.add(self._buffers)
                self._buffers += 1
            else:
                self._held[name] = source.buffer
            run = np.copy if shared else _same
            self._steps.append(Step(run, (source.register,), (state.register,), (), operation))
        for output, _ in operation.outputs:
            value = self._new(output, self._held[name])
            self._steps.append(Step(_same, (state.register,), (value.register,), (), operation))

    def _add_kernel(self, position: int, operation: Operation) -> None:
        kernel = KERNELS.get(operation.kind)
        if kernel is None or operation.blocks:
            raise UnsupportedOpError(f"{self._where(operation)}: operation {operation.kind!r} is not supported")
        node = self._node(operation, kernel)
        run = kernel.build(node)
        sources = self._sources(operation, node)
        finish = [self._finish(kind, kernel, node) for _, kind in operation.outputs]
        exact = kernel.exact if node.exact is None else node.exact
        run = _finished(run, finish) if not exact or _changes_type(kernel, operation) else run
        if sources is not None and all(source.constant is not None for source in sources):
            self._fold(operation, run, sources)
            return
        assert sources is not None
        buffer = None
        if kernel.view:
            buffer = sources[0].buffer
        if kernel.updates and not self._may_overwrite(position, sources[0]):
            run = _on_copy(run)
        writes = tuple(self._new(name, buffer).register for name, _ in operation.outputs)
        if not kernel.view:
            self._owned.update(self._known[name].buffer for name, _ in operation.outputs)
        self._steps.append(Step(run, tuple(source.register for source in sources), writes, (), operation))
    # The rest is private to _add_kernel.

    def _node(self, operation: Operation, kernel: Kernel) -> Node:
        constants: dict[str, Sequence[Constant | None]] = {}
        for name, value in operation.attributes.items():
            if name != "name":
                constants[name] = [self.pool.load(value)]
        for name, arguments in operation.inputs.items():
            constants[name] = [
                self._known[argument].constant if isinstance(argument, str) else self.pool.load(argument)
                for argument in arguments
            ]
        kinds = tuple(kind for _, kind in operation.outputs)
        return Node(operation.kind, self._where(operation), self.function.opset, kinds, constants, list(kernel.operands))

    def _where(self, operation: Operation) -> str:
        return f"function {self.function.name!r}, {operation.kind} {operation.output!r}"


def _same(value: Any) -> Any:
    return value
