"""A function compiled to a flat list of steps: constants folded, dead values freed, updates in place where safe.

Values live in numbered registers. A step calls a kernel on some registers, stores the results and drops registers
that nothing reads again. Which registers share memory is known from which kernels return views, so a cache update
writes into the state's own buffer when nobody can see the old contents any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
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
from ssdevice.mil.finish import TO_FLOAT, Finish, Run, check_type, finished, round_half, to
from ssdevice.mil.registry import KERNELS, Constant, ExecutionError, Kernel, Node, UnsupportedOpError
from ssdevice.mil.schema import Argument, Function, Operation, TensorType, Value
from ssdevice.mil.steps import Plan, Slot, Step, uses, with_frees

FP16 = "fp16"
FP32 = "fp32"
PRECISIONS = (FP16, FP32)

CONST = "const"
READ_STATE = "read_state"
UPDATE_STATE = "coreml_update_state"  # write_state and read_state in one; coremltools splits it when it saves
WRITERS = ("write_state", UPDATE_STATE)


@dataclass
class _Known:
    """A name while compiling: its register, the buffer its memory is part of and, for a constant, value and key."""

    register: int
    buffer: int
    constant: Any = None
    key: Hashable | None = None


class Compiler:
    """Compiles one function for one precision; ``compile`` is called once."""

    def __init__(self, function: Function, pool: ConstantPool, precision: str) -> None:
        self._function = function
        self._pool = pool
        self._half = precision == FP16
        self._registers: list[Any] = []
        self._names: dict[str, _Known] = {}
        self._members: dict[int, list[str]] = defaultdict(list)  # buffer -> names whose memory it is
        self._owned: set[int] = set()  # buffers a run may write into
        self._held: dict[str, int] = {}  # state -> the buffer it holds at this point
        self._steps: list[Step] = []
        self._last, self._events = uses(function)

    def compile(self) -> Plan:
        """The plan. Raises UnsupportedOpError, naming operation, function and output, for what has no kernel."""
        function = self._function
        types = dict(function.inputs)
        for name, kind in function.inputs:
            known = self._define(name)
            if kind.state:
                self._held[name] = known.buffer
                self._owned.add(known.buffer)
                self._members[known.buffer].clear()  # the state is no reader; _may_overwrite asks for its events
        for position, operation in enumerate(function.operations):
            types.update(operation.outputs)
            if operation.kind == CONST:
                self._add_constant(operation)
            elif operation.kind == READ_STATE or operation.kind in WRITERS:
                self._add_state(operation)
            else:
                self._add_kernel(position, operation)

        def slots(names: Sequence[str]) -> dict[str, Slot]:
            return {name: (self._names[name].register, types[name]) for name in names}

        inputs = slots([name for name, kind in function.inputs if not kind.state])
        states, outputs = slots(list(self._held)), slots(function.outputs)
        kept = {register for register, _ in (*states.values(), *outputs.values())}
        constants = {name: known for name, known in self._names.items() if known.constant is not None}
        kept |= {known.register for known in constants.values()}
        return Plan(
            function,
            with_frees(self._steps, kept),
            tuple(self._registers),
            inputs,
            states,
            outputs,
            {name: known.constant for name, known in constants.items() if not isinstance(known.constant, str)},
        )

    def _define(self, name: str, buffer: int | None = None) -> _Known:
        known = _Known(len(self._registers), len(self._members) if buffer is None else buffer)
        self._registers.append(None)
        self._names[name] = known
        self._members[known.buffer].append(name)
        return known

    def _define_constant(self, name: str, value: Any, key: Hashable | None) -> _Known:
        known = self._define(name)
        known.constant, known.key = value, key
        self._registers[known.register] = value
        return known

    def _add_constant(self, operation: Operation) -> None:
        value = operation.attributes.get("val")
        if value is None:
            raise ExecutionError(f"{self._where(operation)}: a constant without a value")
        self._define_constant(operation.output, self._pool.load(value), self._pool.key(value))

    def _add_state(self, operation: Operation) -> None:
        """State operations move references only; a state is a register that a write points at another buffer."""
        name = _argument(operation, "input" if operation.kind == READ_STATE or "input" in operation.inputs else "state")
        if name not in self._held:
            raise ExecutionError(f"{self._where(operation)}: {name!r} is no state of the function")
        register = self._names[name].register
        if operation.kind in WRITERS:
            source = self._names[_argument(operation, "value" if "value" in operation.inputs else "data")]
            others = [buffer for state, buffer in self._held.items() if state != name]
            if source.buffer in self._owned and source.buffer not in others:
                self._held[name] = source.buffer
                self._steps.append(Step(_same, (source.register,), (register,), (), operation))
            else:
                self._held[name] = len(self._members)
                self._members[self._held[name]] = []
                self._owned.add(self._held[name])
                self._steps.append(Step(np.array, (source.register,), (register,), (), operation))
        for output, _ in operation.outputs:
            target = self._define(output, self._held[name]).register
            self._steps.append(Step(_same, (register,), (target,), (), operation))

    def _add_kernel(self, position: int, operation: Operation) -> None:
        kernel = KERNELS.get(operation.kind)
        if kernel is None or operation.blocks:
            raise UnsupportedOpError(
                f"{self._where(operation)}: operation {operation.kind!r} is not supported by the interpreter; "
                f"export the bundle again if the package was edited, else run it on a Mac"
            )
        node = self._node(operation, kernel)
        run = _on_wide(kernel.build(node)) if kernel.sums else kernel.build(node)
        sources = self._sources(operation, node)
        finish = [self._finish(kind, kernel, node) for _, kind in operation.outputs]
        if all(source.constant is not None for source in sources):
            self._fold(operation, finished(_on_copy(run) if kernel.updates else run, finish), sources)
            return
        if kernel.updates and not self._may_overwrite(position, sources):
            run = _on_copy(run)
        buffer = sources[0].buffer if kernel.view else None
        targets = [self._define(name, buffer) for name, _ in operation.outputs]
        if not kernel.view:
            self._owned.update(target.buffer for target in targets)
        reads, writes = tuple(source.register for source in sources), tuple(target.register for target in targets)
        self._steps.append(Step(finished(run, finish), reads, writes, (), operation))

    def _node(self, operation: Operation, kernel: Kernel) -> Node:
        constants: dict[str, list[Constant | None]] = {}
        for name, value in operation.attributes.items():
            if name != "name":
                constants[name] = [self._pool.load(value)]
        for name, arguments in operation.inputs.items():
            constants[name] = [self._known(argument).constant for argument in arguments]
        kinds = tuple(kind for _, kind in operation.outputs)
        return Node(operation.kind, self._where(operation), self._function.opset, kinds, constants, [*kernel.operands])

    def _known(self, argument: Argument) -> _Known:
        if isinstance(argument, str):
            return self._names[argument]
        return _Known(-1, -1, self._pool.load(argument), self._pool.key(argument))

    def _sources(self, operation: Operation, node: Node) -> list[_Known]:
        """What the operands are, in order; constants written in place get a register."""
        sources = []
        for operand in node.operands:
            name = operand.rstrip("?*")
            arguments: Sequence[Argument] = operation.inputs.get(name, ())
            if not arguments and name in operation.attributes:
                arguments = (operation.attributes[name],)
            if not arguments and not operand.endswith("?"):
                raise ExecutionError(f"{node.where}: parameter {name!r} is missing")
            for argument in arguments:
                known = self._known(argument)
                if isinstance(argument, Value):
                    unique = f"{operation.output}.{name}.{len(self._registers)}"
                    known = self._define_constant(unique, known.constant, known.key)
                sources.append(known)
        return sources

    def _finish(self, kind: TensorType, kernel: Kernel, node: Node) -> Finish | None:
        """What brings an output to its declared type; None if the kernel's result has it already."""
        exact = kernel.exact if node.exact is None else node.exact
        if kind.dtype is None:
            raise UnsupportedOpError(f"{node.where}: an output that is a string")
        if kind.dtype.name == "float16" and not exact and (self._half or kernel.weight):
            return round_half
        if kernel.view or kernel.updates:
            return None
        return TO_FLOAT if kind.dtype.floating else to(kind.dtype.storage)

    def _fold(self, operation: Operation, run: Run, sources: list[_Known]) -> None:
        parameters: list[Hashable] = [operation.kind, len(operation.outputs), *self._declared(operation)]
        for name, arguments in sorted(operation.inputs.items()):
            parameters.append((name, *(self._known(argument).key for argument in arguments)))
        for name, value in sorted(operation.attributes.items()):
            if name != "name":
                parameters.append((name, self._pool.key(value)))
        known = all(self._known(argument).key is not None for args in operation.inputs.values() for argument in args)
        key = tuple(parameters) if known else None
        try:
            result = self._pool.fold(key, lambda: run(*[source.constant for source in sources]))
        except (ArithmeticError, IndexError, MemoryError, TypeError, ValueError, ExecutionError) as error:
            raise ExecutionError(f"{self._where(operation)}: {error}") from error
        results = result if len(operation.outputs) > 1 or isinstance(result, tuple) else (result,)
        for index, ((name, kind), value) in enumerate(zip(operation.outputs, results, strict=True)):
            check_type(value, kind, self._where(operation))
            self._define_constant(name, value, None if key is None else (key, index))

    @staticmethod
    def _declared(operation: Operation) -> list[Hashable]:
        return [kind for _, kind in operation.outputs]

    def _may_overwrite(self, position: int, sources: list[_Known]) -> bool:
        """Whether an update may write into its first operand: the run owns it and nothing reads it afterwards."""
        buffer = sources[0].buffer
        if buffer not in self._owned or any(source.buffer == buffer for source in sources[1:]):
            return False
        if any(self._last.get(name, -1) > position for name in self._members[buffer]):
            return False
        for state in (name for name, held in self._held.items() if held == buffer):
            following = [kind for at, kind in self._events[state] if at > position]
            if not following or following[0] not in WRITERS:
                return False
        return True

    def _where(self, operation: Operation) -> str:
        return f"function {self._function.name!r}, {operation.kind} {operation.output!r}"


def _same(value: Any) -> Any:
    return value


def _on_wide(run: Run) -> Run:
    single = np.float32
    return lambda *operands: run(*[x.astype(np.float64) if x.dtype == single else x for x in operands])


def _on_copy(run: Run) -> Run:
    return lambda data, *rest: run(data.copy(), *rest)


def _argument(operation: Operation, name: str) -> str:
    arguments = operation.inputs.get(name, ())
    if len(arguments) != 1 or not isinstance(arguments[0], str):
        raise ExecutionError(f"{operation.kind} {operation.output!r}: parameter {name!r} does not name one value")
    return arguments[0]
