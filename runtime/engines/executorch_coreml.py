"""Programs whose functions are lowered to Core ML, where there is no Core ML: their delegates in the MIL interpreter.

ExecuTorch's Core ML delegate holds a package of one function per method; the only operator outside is the write of new
rows into the cache. So the very file that a phone gets can be run here: instruction by instruction as its flatbuffer
says, delegates by ``ssdevice.mil``. That is slow, and proves integers and rows, not what a device makes of them.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.errors import BundleError
from ssdevice.mil.program import Program as Interpreter
from ssdevice.mil.reader import Package
from ssdevice.runtime.engines.executorch_file import DELEGATE, KERNEL, SEGMENT
from ssdevice.runtime.engines.executorch_flatbuffer import Data, Table, read_program, segment

BACKEND = "CoreMLBackend"
WRITE = "aten::index_put_"
REFERENCE = b"CMJR"
"""Begins the data of a delegate that shares its package with others, and says where that is."""
PACKAGE = "model.mlpackage"
METADATA = "metadata.json"
MAX_DIRECTORY_BYTES = 1 << 20
SLOW = "ssdevice: Core ML delegates run on Apple's systems alone; here their operations run in NumPy one by one, slowly"
SCALARS: Mapping[int, type[np.generic]] = {3: np.int32, 4: np.int64, 6: np.float32}
"""Numpy's types by ExecuTorch's ScalarType, as far as a step's tensors need them."""
TENSOR, OPTIONAL_TENSORS = 5, 11
"""Members of the union KernelTypes."""
Array = NDArray[Any]


@dataclass(frozen=True)
class Value:
    """A tensor of a method. ``name``: of one that outlives a call."""

    shape: tuple[int, ...]
    dtype: type[np.generic]
    name: str


@dataclass(frozen=True)
class Delegate:
    """A call of a function of the package; ``inputs``, ``outputs``: its names, and the values that stand for them."""

    function: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Write:
    """``state[:, at] = rows``, in place."""

    state: int
    at: int
    rows: int


@dataclass(frozen=True)
class Method:
    """A method as its flatbuffer has it; integers are places among ``values``."""

    values: Mapping[int, Value]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instructions: tuple[Delegate | Write, ...]


class InterpretedProgram:
    """A program with Core ML delegates, with what LoadedProgram uses of ``executorch.runtime.Program``.

    ``program``: ExecuTorch's own of the same file, which tells shapes and runs methods without delegates. Raises
    BundleError for a file that calls anything but such delegates and writes of the cache.
    """

    def __init__(self, file: Path, program: Any) -> None:
        self._program = program
        self.method_names: set[str] = program.method_names
        self._methods, self.interpreter = open_delegates(file)
        self.states = {
            value.name: np.zeros(value.shape, value.dtype)
            for method in self._methods.values()
            for value in method.values.values()
            if value.name
        }

    def load_method(self, name: str) -> Any:
        """A method, under ``_method`` as ExecuTorch has it."""
        if name not in self._methods:
            return self._program.load_method(name)
        return InterpretedMethod(self._methods[name], self.interpreter, self.states, self._program.metadata(name))

    def metadata(self, name: str) -> Any:
        """Shapes of a method's tensors."""
        return self._program.metadata(name)


class InterpretedMethod:
    """One method; its inputs and outputs are torch tensors, as in ExecuTorch's binding."""

    def __init__(self, method: Method, interpreter: Interpreter, states: Mapping[str, Array], metadata: Any) -> None:
        self._from_numpy: Callable[[Array], Any] = importlib.import_module("torch").from_numpy
        self._called, self._interpreter, self._states, self._metadata = method, interpreter, states, metadata

    @property
    def _method(self) -> InterpretedMethod:
        return self

    def method_meta(self) -> Any:
        """Shapes of its tensors."""
        return self._metadata

    def get_attribute(self, name: str) -> Any:
        """A live tensor that outlives calls; raises RuntimeError as ExecuTorch does."""
        if name not in self._states:
            raise RuntimeError(f"no tensor {name}")
        return self._from_numpy(self._states[name])

    def call(self, tensors: Sequence[Any], clone_outputs: bool = True) -> list[Any]:
        """Every instruction in order. Outputs are new, however asked. Raises RuntimeError as ExecuTorch does."""
        method = self._called
        held: dict[int, Array] = {
            place: self._states[value.name] for place, value in method.values.items() if value.name
        }
        held |= {place: tensor.numpy() for place, tensor in zip(method.inputs, tensors, strict=True)}
        for instruction in method.instructions:
            if isinstance(instruction, Delegate):
                inputs = {name: held[place] for name, place in instruction.inputs}
                out = self._interpreter.run(instruction.function, inputs)
                for name, place in instruction.outputs:
                    held[place] = out[name]
            else:
                state, at = held[instruction.state], held[instruction.at]
                if at.min() < 0 or at.max() >= state.shape[1]:
                    raise RuntimeError(f"rows {at.tolist()} in a cache of {state.shape[1]}")
                state[:, at] = held[instruction.rows]
        return [self._from_numpy(held[place]) for place in method.outputs]


def open_delegates(file: Path) -> tuple[dict[str, Method], Interpreter]:
    """Methods with Core ML delegates by name, and their package, whose files are kept as long as it is.

    Raises BundleError for a program that calls anything but such delegates and writes of the cache.
    """
    folder = Path(tempfile.mkdtemp(prefix="ssdevice-"))
    try:
        methods = read_program(file, lambda data, root: _Reader(data, root, folder).methods())
        package = Package.open(folder / PACKAGE)
        _check(file, package, methods)
        interpreter = Interpreter(package)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(interpreter, shutil.rmtree, folder, ignore_errors=True)
    return methods, interpreter


def _check(file: Path, package: Package, methods: Mapping[str, Method]) -> None:
    """Raise BundleError unless delegates take and give what the program has laid out memory for."""
    for name, method in methods.items():
        for call in method.instructions:
            if not isinstance(call, Delegate):
                continue
            spec = package.spec(call.function)
            given = {tensor.name: (tensor.shape, tensor.dtype) for tensor in (*spec.inputs, *spec.outputs)}
            for tensor, place in (*call.inputs, *call.outputs):
                value = method.values[place]
                wanted = value.shape, np.dtype(value.dtype).name
                if given.get(tensor) != wanted:
                    raise BundleError(
                        f"{file}: {name} has {tensor!r} as {wanted}, its delegate as {given.get(tensor)}; "
                        "export the bundle again"
                    )


def has_delegates(file: Path) -> bool:
    """Whether a program has Core ML delegates; raises BundleError for a file that is no whole program."""
    return read_program(file, lambda _, root: any(_is_delegated(plan) for plan in root.tables(1)))


def say_slow() -> None:
    """Tell once that this is not how fast a device is."""
    if SLOW not in _said:
        _said.add(SLOW)
        print(SLOW, file=sys.stderr)


_said: set[str] = set()


def _is_delegated(plan: Table) -> bool:
    return any(entry.text(0) == BACKEND for entry in plan.tables(7))


class _Reader:
    """The methods of a program, and the package that they share, written into a folder."""

    def __init__(self, data: Data, root: Table, folder: Path) -> None:
        self.data, self.root, self.folder = data, root, folder
        self.segments = [segment(data, entry) for entry in root.tables(4)]
        self.named = {entry.text(0): entry.integer(1) for entry in root.tables(7)}
        self.keys: set[str] = set()
        self.names: dict[str, tuple[list[str], list[str]]] = {}

    def methods(self) -> dict[str, Method]:
        """By name, those with delegates."""
        return {plan.text(0): self._method(plan) for plan in self.root.tables(1) if _is_delegated(plan)}

    def _method(self, plan: Table) -> Method:
        entries = list(plan.tables(2))
        values = {place: _value(entry.table(1)) for place, entry in enumerate(entries) if entry.byte(0) == TENSOR}
        operators = [entry.text(0) for entry in plan.tables(6)]
        delegates = list(plan.tables(7))
        made: list[Delegate | Write] = []
        for chain in plan.tables(5):
            for instruction in chain.tables(2):
                kind, call = instruction.byte(0), instruction.table(1)
                arguments = call.integers(1)
                if kind == DELEGATE:
                    made.append(self._delegate(delegates[call.integer(0)], arguments))
                elif kind == KERNEL and operators[call.integer(0)] == WRITE:
                    made.append(_write(entries, arguments))
                else:
                    what = operators[call.integer(0)] if kind == KERNEL else f"an instruction of kind {kind}"
                    raise ValueError(f"{plan.text(0)} calls {what} outside its delegates")
        return Method(values, tuple(plan.integers(3)), tuple(plan.integers(4)), tuple(made))

    def _delegate(self, entry: Table, arguments: Sequence[int]) -> Delegate:
        place = entry.table(1)
        start, size = self.segments[place.integer(1)]
        payload = self.data[start : start + size]
        if entry.text(0) != BACKEND or place.byte(0) != SEGMENT or payload[:4] != REFERENCE:
            raise ValueError(f"a delegate {entry.text(0)!r} without a package that methods share")
        reference = json.loads(payload[4:].rstrip(b"\0"))
        function, key = str(reference["functionName"]), str(reference["key"])
        self._unpack(key)
        inputs, outputs = self.names[function]
        if len(inputs) + len(outputs) != len(arguments):
            raise ValueError(f"{function} has {len(inputs) + len(outputs)} tensors, its call {len(arguments)}")
        split = len(inputs)
        return Delegate(
            function,
            tuple(zip(inputs, arguments[:split], strict=True)),
            tuple(zip(outputs, arguments[split:], strict=True)),
        )

    def _unpack(self, key: str) -> None:
        """Write the folder that a segment holds: its files, then backwards a directory of them in JSON."""
        if key in self.keys:
            return
        if self.keys:
            raise ValueError("delegates of several packages")
        self.keys.add(key)
        start, size = self.segments[self.named[key]]
        blob = self.data[start : start + size]
        text = blob[-MAX_DIRECTORY_BYTES:][::-1].decode("latin-1")
        nodes = json.JSONDecoder().raw_decode(text)[0]["nodes"]
        _write_node(nodes, len(nodes) - 1, blob, self.folder)
        methods = json.loads((self.folder / METADATA).read_text("utf-8"))["methods"]
        self.names = {name: (found["inputNames"], found["outputNames"]) for name, found in methods.items()}


def _write_node(nodes: list[Any], number: int, blob: bytes, target: Path) -> None:
    """A file or a folder; children come before their folder, so a directory cannot go in circles."""
    node = nodes[number]
    if node["kind"] == 0:
        start, size = int(node["dataRegion"]["offset"]), int(node["dataRegion"]["size"])
        if not 0 <= start <= start + size <= len(blob):
            raise ValueError(f"{target.name} lies at {start} of {len(blob)} bytes")
        target.write_bytes(blob[start : start + size])
        return
    target.mkdir(exist_ok=True)
    for name, child in node["children"].items():
        if Path(name).name != name or name in ("", ".", "..") or not 0 <= child < number:
            raise ValueError(f"a directory with an entry {name!r}")
        _write_node(nodes, child, blob, target / name)


def _value(tensor: Table) -> Value:
    scalar = tensor.byte(0)
    if scalar not in SCALARS:
        raise ValueError(f"a tensor of scalar type {scalar}")
    name = tensor.table(9).text(1) if tensor.has(9) else ""
    return Value(tuple(tensor.integers(2)), SCALARS[scalar], name)


def _write(entries: Sequence[Table], arguments: Sequence[int]) -> Write:
    """``index_put_(state, [None, at], rows, accumulate=False)``."""
    state, indices, rows, accumulate = arguments[:4]
    if entries[indices].byte(0) != OPTIONAL_TENSORS or entries[accumulate].table(1).byte(0):
        raise ValueError("a write that is not one of rows")
    over, at = entries[indices].table(1).integers(0)
    if over != -1:
        raise ValueError("a write that is not one of rows")
    return Write(state, at, rows)
