"""Programs that are lowered to Core ML, read from their flatbuffer and run without Core ML by the
MIL interpreter.

So the file that a phone gets can be run here. That is slow, and verifies integers and rows, not a
device's arithmetic. ExecuTorch's Core ML backend stores one package, with a function per method, in
a segment of the file, as a flattened folder. A method calls its function and then writes new rows
into the cache; anything else is refused.
"""

import importlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ssdevice.errors import BundleError
from ssdevice.mil.program import Program as Interpreter
from ssdevice.mil.reader import Package
from ssdevice.runtime.executorch import file as program
from ssdevice.runtime.executorch.checks import OPTIONAL_TENSORS, TENSOR
from ssdevice.runtime.executorch.file import (
    COREML,
    DELEGATE,
    KERNEL,
    Data,
    Table,
    is_coreml,
    read_program,
)
from ssdevice.runtime.notice import say_once

SLOW = (
    "ssdevice: Core ML delegates run only on Apple's systems; here their operations run in NumPy "
    "one by one, slowly"
)
WRITE = "aten::index_put_"
REFERENCE = b"CMJR"
"""Prefix of the data of a delegate that refers to a shared package."""
PACKAGE = "model.mlpackage"
METADATA = "metadata.json"
MAX_DIRECTORY_BYTES = 1 << 20
SCALARS: Mapping[int, type[np.generic]] = {3: np.int32, 4: np.int64, 6: np.float32}
"""ExecuTorch's ScalarType -> NumPy's types, for the types that a step's tensors have."""
Array = NDArray[Any]
Named = tuple[tuple[str, int], ...]
"""Tensors of a function, each with its value in the method."""
Form = tuple[tuple[int, ...], type[np.generic]]
"""Shape and type of a tensor."""


@dataclass(frozen=True)
class Method:
    """A call of ``function``, then writes ``state[:, at] = rows``, in place.

    Integers number the method's values.

    ``inputs``, ``outputs``: the method's.
    ``given``, ``made``: the function's.
    ``writes``: (state, at, rows).
    ``states``: the names of tensors that outlive a call, with shape and type.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    function: str
    given: Named
    made: Named
    writes: tuple[tuple[int, int, int], ...]
    states: Mapping[int, tuple[str, Form]]


class InterpretedProgram:
    """A program with Core ML delegates.

    It has the part of ``executorch.runtime.Program`` that LoadedProgram uses.

    ``program``: ExecuTorch's own object for the same file, which knows shapes and runs methods
    without delegates. Raises the errors of ``open_delegates``.
    """

    def __init__(self, file: Path, program: Any) -> None:
        say_once(SLOW)
        self._program = program
        self.method_names: set[str] = program.method_names
        self._methods, self.interpreter = open_delegates(file)
        self.states: dict[str, Array] = {}
        for method in self._methods.values():
            for state, form in method.states.values():
                self.states[state] = np.zeros(*form)

    def load_method(self, name: str) -> Any:
        """A method, with the attribute ``_method`` of ExecuTorch's class."""
        if name not in self._methods:
            return self._program.load_method(name)
        return InterpretedMethod(
            self._methods[name], self.interpreter, self.states, self._program.metadata(name)
        )


class InterpretedMethod:
    """One method; its inputs and outputs are torch tensors, as in ExecuTorch's binding."""

    def __init__(
        self, method: Method, interpreter: Interpreter, states: Mapping[str, Array], metadata: Any
    ) -> None:
        self._from_numpy: Callable[[Array], Any] = importlib.import_module("torch").from_numpy
        self._called = method
        self._interpreter = interpreter
        self._states = states
        self._metadata = metadata

    @property
    def _method(self) -> Self:
        return self

    def method_meta(self) -> Any:
        return self._metadata

    def get_attribute(self, name: str) -> Any:
        """A live tensor of the program's state. Raises RuntimeError, as ExecuTorch does."""
        if name not in self._states:
            raise RuntimeError(f"no tensor {name}")
        return self._from_numpy(self._states[name])

    def call(self, tensors: Sequence[Any], clone_outputs: bool = True) -> list[Any]:
        """Run it. Outputs are always new. Raises RuntimeError, as ExecuTorch does."""
        method = self._called
        held = {place: self._states[name] for place, (name, _) in method.states.items()}
        held |= {
            place: tensor.numpy() for place, tensor in zip(method.inputs, tensors, strict=True)
        }
        out = self._interpreter.run(
            method.function, {name: held[place] for name, place in method.given}
        )
        held |= {place: out[name] for name, place in method.made}
        for state, at, rows in method.writes:
            cache = held[state]
            positions = held[at]
            if positions.min() < 0 or positions.max() >= cache.shape[1]:
                raise RuntimeError(f"rows {positions.tolist()} in a cache of {cache.shape[1]}")
            cache[:, positions] = held[rows]
        return [self._from_numpy(held[place]) for place in method.outputs]


def open_delegates(file: Path) -> tuple[dict[str, Method], Interpreter]:
    """The methods with Core ML delegates by name, and the interpreter of their package.

    The package's files live as long as the interpreter does. Raises BundleError for a damaged
    program, and for one whose methods do anything else than ``Method`` says.
    """
    folder = Path(tempfile.mkdtemp(prefix="ssdevice-"))
    try:
        methods, package = read_program(file, lambda data, root: _Reader(data, root, folder).read())
        interpreter = Interpreter(package)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, BundleError):  # users do not know the temporary folder
            raise BundleError(str(error).replace(str(folder), str(file))) from error
        raise
    weakref.finalize(interpreter, shutil.rmtree, folder, ignore_errors=True)
    return methods, interpreter


class _Reader:
    """Reads the methods of a program and unpacks the package that they share into a folder."""

    def __init__(self, data: Data, root: Table, folder: Path) -> None:
        self.data = data
        self.root = root
        self.folder = folder
        self.key = ""
        self.names: dict[str, tuple[list[str], list[str]]] = {}

    def read(self) -> tuple[dict[str, Method], Package]:
        plans = [plan for plan in self.root.tables(1) if is_coreml(plan)]
        methods = {plan.text(0): self._method(plan) for plan in plans}
        return methods, self.package

    def _method(self, plan: Table) -> Method:
        entries = list(plan.tables(2))
        name = plan.text(0)
        values = {
            place: entry.table(1) for place, entry in enumerate(entries) if entry.byte(0) == TENSOR
        }

        def tensors(places: Sequence[int]) -> tuple[int, ...]:
            strange = set(places) - values.keys()
            if strange:
                raise ValueError(f"{name} uses value {min(strange)}, which is no tensor")
            return tuple(places)

        operators = [entry.text(0) for entry in plan.tables(6)]
        call: tuple[str, Named, Named] | None = None
        writes: list[tuple[int, int, int]] = []
        for instruction in program.instructions(plan):
            kind = instruction.byte(0)
            called = instruction.table(1)
            arguments = called.integers(1)
            if kind == DELEGATE and call is None:
                given = [(place, values[place]) for place in tensors(arguments)]
                call = self._delegate(list(plan.tables(7))[called.integer(0)], given)
            elif kind == KERNEL and operators[called.integer(0)] == WRITE and call is not None:
                state, at, rows = tensors(_written(entries, arguments))
                writes.append((state, at, rows))
            elif kind == KERNEL:
                operator = operators[called.integer(0)]
                raise ValueError(f"{name} calls {operator} outside its delegates")
            else:
                raise ValueError(
                    f"{name} calls an instruction of kind {kind} outside its delegates"
                )
        if call is None:
            raise ValueError(f"{name} does not call its delegate")
        states = {
            place: (value.table(9).text(1), _form(value))
            for place, value in values.items()
            if value.has(9)
        }
        return Method(
            tensors(plan.integers(3)), tensors(plan.integers(4)), *call, tuple(writes), states
        )

    def _delegate(
        self, entry: Table, arguments: Sequence[tuple[int, Table]]
    ) -> tuple[str, Named, Named]:
        """A call's function, its inputs and its outputs.

        ``arguments`` must have the package's shapes and types.
        """
        payload = program.payload_of(self.data, self.root, entry)
        if entry.text(0) != COREML or payload[:4] != REFERENCE:
            raise ValueError(f"a delegate {entry.text(0)!r} without a shared package")
        reference = json.loads(payload[4:].rstrip(b"\0"))
        function = str(reference["functionName"])
        key = str(reference["key"])
        self._unpack(key)
        inputs, outputs = self.names[function]
        spec = self.package.spec(function)
        tensors = (*spec.inputs, *spec.outputs)
        own = {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}
        calls = []
        for name, (place, value) in zip((*inputs, *outputs), arguments, strict=True):
            shape, dtype = _form(value)
            if own.get(name) != (shape, np.dtype(dtype).name):
                raise ValueError(
                    f"{function}: a call has {name!r} as {shape} {dtype}, "
                    f"the package as {own.get(name)}"
                )
            calls.append((name, place))
        return function, tuple(calls[: len(inputs)]), tuple(calls[len(inputs) :])

    def _unpack(self, key: str) -> None:
        """Write the folder in a segment.

        The segment holds the folder's files, then a directory in JSON, in reverse byte order.
        """
        if key == self.key:
            return
        if self.key:
            raise ValueError("delegates of several packages")
        self.key = key
        start, size = program.segment(self.data, program.named_segments(self.root)[key])
        blob = self.data[start : start + size]
        text = blob[-MAX_DIRECTORY_BYTES:][::-1].decode("latin-1")
        _write_folder(json.JSONDecoder().raw_decode(text)[0]["nodes"], blob, self.folder)
        methods = json.loads((self.folder / METADATA).read_text("utf-8"))["methods"]
        self.names = {
            name: (found["inputNames"], found["outputNames"]) for name, found in methods.items()
        }
        self.package = Package.open(self.folder / PACKAGE)


def _write_folder(nodes: Sequence[Any], blob: bytes, folder: Path) -> None:
    """Write a flattened folder.

    ``nodes``: its entries, the last of which is the folder itself.
    ``blob``: the bytes of its files.

    Each node is written once, and all files together are no larger than the blob.
    """
    left = set(range(len(nodes)))
    room = len(blob)
    waiting = [(len(nodes) - 1, folder)]
    while waiting:
        number, target = waiting.pop()
        left.remove(number)
        node = nodes[number]
        if node["kind"] == 0:
            start = int(node["dataRegion"]["offset"])
            size = int(node["dataRegion"]["size"])
            room -= size
            if not 0 <= start <= start + size <= len(blob) or room < 0:
                raise ValueError(f"{target.name} is at {start} of {len(blob)} bytes")
            target.write_bytes(blob[start : start + size])
            continue
        target.mkdir(exist_ok=True)
        for name, child in dict(node["children"]).items():
            if Path(name).name != name or name in ("", ".", ".."):
                raise ValueError(f"a folder with an entry {name!r}")
            waiting.append((child, target / name))


def _form(tensor: Table) -> Form:
    scalar = tensor.byte(0)
    if scalar not in SCALARS:
        raise ValueError(f"a tensor of scalar type {scalar}")
    return tuple(tensor.integers(2)), SCALARS[scalar]


def _written(entries: Sequence[Table], arguments: Sequence[int]) -> tuple[int, int, int]:
    """State, positions and rows of ``index_put_(state, [None, at], rows, accumulate=False)``."""
    state, indices, rows, accumulate = arguments[:4]
    if entries[indices].byte(0) != OPTIONAL_TENSORS or entries[accumulate].table(1).byte(0):
        raise ValueError("a write that is not of rows")
    over, at = entries[indices].table(1).integers(0)
    if over != -1:
        raise ValueError("a write that is not of rows")
    return state, at, rows
