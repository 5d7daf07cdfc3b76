"""Reads a program with Core ML delegates: its methods, and the package that they share.

ExecuTorch's Core ML backend stores one package, with a function per method, in a segment of the file, as a flattened
folder. The only operator outside delegates is the write of new rows into the cache; anything else is refused.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssdevice.errors import BundleError
from ssdevice.mil.program import Program as Interpreter
from ssdevice.mil.reader import Package
from ssdevice.runtime.executorch import file as program
from ssdevice.runtime.executorch.file import COREML, DELEGATE, KERNEL, Data, Table, is_coreml, read_program

WRITE = "aten::index_put_"
REFERENCE = b"CMJR"
"""Prefix of the data of a delegate that refers to a shared package."""
PACKAGE = "model.mlpackage"
METADATA = "metadata.json"
MAX_DIRECTORY_BYTES = 1 << 20
SCALARS: Mapping[int, type[np.generic]] = {3: np.int32, 4: np.int64, 6: np.float32}
"""ExecuTorch's ScalarType -> NumPy's types, for the types that a step's tensors have."""
TENSOR, OPTIONAL_TENSORS = 5, 11
"""Members of the union KernelTypes."""


@dataclass(frozen=True)
class Value:
    """A tensor of a method. ``name``: set only if it outlives a call."""

    shape: tuple[int, ...]
    dtype: type[np.generic]
    name: str


@dataclass(frozen=True)
class Delegate:
    """A call of a function of the package; ``inputs`` and ``outputs``: its tensors' names with the method's values."""

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
    """A method as in its flatbuffer; integers are indices into ``values``."""

    values: Mapping[int, Value]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instructions: tuple[Delegate | Write, ...]


def open_delegates(file: Path) -> tuple[dict[str, Method], Interpreter]:
    """The methods with Core ML delegates by name, and their package, whose files live as long as it does.

    Raises BundleError for a program that calls anything but such delegates and writes of the cache.
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
        self.data, self.root, self.folder = data, root, folder
        self.key = ""
        self.names: dict[str, tuple[list[str], list[str]]] = {}

    def read(self) -> tuple[dict[str, Method], Package]:
        """The methods with delegates by name, and their package."""
        methods = {plan.text(0): self._method(plan) for plan in self.root.tables(1) if is_coreml(plan)}
        return methods, self.package

    def _method(self, plan: Table) -> Method:
        entries = list(plan.tables(2))
        values = {place: _value(entry.table(1)) for place, entry in enumerate(entries) if entry.byte(0) == TENSOR}

        def tensors(places: Sequence[int]) -> tuple[int, ...]:
            if strange := set(places) - values.keys():
                raise ValueError(f"{plan.text(0)} uses value {min(strange)}, which is no tensor")
            return tuple(places)

        operators = [entry.text(0) for entry in plan.tables(6)]
        delegates = list(plan.tables(7))
        made: list[Delegate | Write] = []
        for instruction in program.instructions(plan):
            kind, call = instruction.byte(0), instruction.table(1)
            arguments = call.integers(1)
            if kind == DELEGATE:
                given = {place: values[place] for place in tensors(arguments)}
                made.append(self._delegate(delegates[call.integer(0)], arguments, given))
            elif kind == KERNEL and operators[call.integer(0)] == WRITE:
                made.append(Write(*tensors(_written(entries, arguments))))
            else:
                what = operators[call.integer(0)] if kind == KERNEL else f"an instruction of kind {kind}"
                raise ValueError(f"{plan.text(0)} calls {what} outside its delegates")
        return Method(values, tensors(plan.integers(3)), tensors(plan.integers(4)), tuple(made))

    def _delegate(self, entry: Table, arguments: Sequence[int], given: Mapping[int, Value]) -> Delegate:
        """A call with the values ``given``, which have the shapes and types of the package's tensors."""
        payload = program.payload_of(self.data, self.root, entry)
        if entry.text(0) != COREML or payload[:4] != REFERENCE:
            raise ValueError(f"a delegate {entry.text(0)!r} without a shared package")
        reference = json.loads(payload[4:].rstrip(b"\0"))
        function, key = str(reference["functionName"]), str(reference["key"])
        self._unpack(key)
        inputs, outputs = self.names[function]
        calls = tuple(zip((*inputs, *outputs), arguments, strict=True))
        spec = self.package.spec(function)
        types = {tensor.name: (tensor.shape, tensor.dtype) for tensor in (*spec.inputs, *spec.outputs)}
        for name, place in calls:
            found = given[place].shape, np.dtype(given[place].dtype).name
            if types.get(name) != found:
                raise ValueError(f"{function}: a call has {name!r} as {found}, the package as {types.get(name)}")
        return Delegate(function, calls[: len(inputs)], calls[len(inputs) :])

    def _unpack(self, key: str) -> None:
        """Write the folder in a segment, which holds its files, then a JSON directory in reverse byte order."""
        if key == self.key:
            return
        if self.key:
            raise ValueError("delegates of several packages")
        self.key = key
        start, size = program.segment(self.data, program.named_segments(self.root)[key])
        blob = self.data[start : start + size]
        text = blob[-MAX_DIRECTORY_BYTES:][::-1].decode("latin-1")
        nodes = json.JSONDecoder().raw_decode(text)[0]["nodes"]
        _Folder(nodes, blob).write(len(nodes) - 1, self.folder)
        methods = json.loads((self.folder / METADATA).read_text("utf-8"))["methods"]
        self.names = {name: (found["inputNames"], found["outputNames"]) for name, found in methods.items()}
        self.package = Package.open(self.folder / PACKAGE)


class _Folder:
    """A flattened folder: ``nodes``, of which the last is the folder itself, and the bytes of its files."""

    def __init__(self, nodes: Sequence[Any], blob: bytes) -> None:
        self.nodes, self.blob = nodes, blob
        self.room = len(blob)
        self.waiting = set(range(len(nodes)))

    def write(self, number: int, target: Path) -> None:
        """Write a node to ``target``. Each node is written once, and all files together are no larger than the blob."""
        self.waiting.remove(number)
        node = self.nodes[number]
        if node["kind"] == 0:
            start, size = int(node["dataRegion"]["offset"]), int(node["dataRegion"]["size"])
            self.room -= size
            if not 0 <= start <= start + size <= len(self.blob) or self.room < 0:
                raise ValueError(f"{target.name} is at {start} of {len(self.blob)} bytes")
            target.write_bytes(self.blob[start : start + size])
            return
        target.mkdir(exist_ok=True)
        for name, child in dict(node["children"]).items():
            if Path(name).name != name or name in ("", ".", ".."):
                raise ValueError(f"a folder with an entry {name!r}")
            self.write(child, target / name)


def _value(tensor: Table) -> Value:
    scalar = tensor.byte(0)
    if scalar not in SCALARS:
        raise ValueError(f"a tensor of scalar type {scalar}")
    name = tensor.table(9).text(1) if tensor.has(9) else ""
    return Value(tuple(tensor.integers(2)), SCALARS[scalar], name)


def _written(entries: Sequence[Table], arguments: Sequence[int]) -> tuple[int, int, int]:
    """State, positions and rows of ``index_put_(state, [None, at], rows, accumulate=False)``."""
    state, indices, rows, accumulate = arguments[:4]
    if entries[indices].byte(0) != OPTIONAL_TENSORS or entries[accumulate].table(1).byte(0):
        raise ValueError("a write that is not of rows")
    over, at = entries[indices].table(1).integers(0)
    if over != -1:
        raise ValueError("a write that is not of rows")
    return state, at, rows
