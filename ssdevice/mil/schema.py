"""The contents of a model file as dataclasses: functions, operations, types, constants (Model.proto, MIL.proto)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ssdevice import wire
from ssdevice.mil.dtypes import BY_PROTO, STRING_PROTO, Array, DType, unpack
from ssdevice.wire import Message, WireError

MAX_NESTING = 8
MAX_RANK = 16
MAX_SIZE = 1 << 31
OPSETS = ("CoreML5", "CoreML6", "CoreML7", "CoreML8", "CoreML9")


@dataclass(frozen=True)
class BlobRef:
    """A constant in the weight file: ``file`` as the model spells it, ``offset`` of its metadata in bytes."""

    file: str
    offset: int


@dataclass(frozen=True)
class TensorType:
    """Element type (None for strings), shape (None for a size known only at run time), and whether it is a state."""

    dtype: DType | None
    shape: tuple[int | None, ...]
    state: bool = False

    @property
    def count(self) -> int:
        """Number of elements; unknown sizes count as 0."""
        return math.prod(size or 0 for size in self.shape)


@dataclass(frozen=True, eq=False)
class Value:
    """A constant: ``data`` is an array, a string, a reference into the weight file or a tuple of values."""

    type: TensorType | None
    data: Array | str | BlobRef | tuple[Value, ...]


Argument = str | Value


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation. Its parameters are names of values or inline constants; ``blocks`` counts nested blocks."""

    kind: str
    inputs: Mapping[str, tuple[Argument, ...]]
    outputs: tuple[tuple[str, TensorType], ...]
    attributes: Mapping[str, Value]
    blocks: int

    @property
    def output(self) -> str:
        """Name of the first output, by which error messages identify the operation."""
        return self.outputs[0][0] if self.outputs else "(no output)"

    def names(self) -> Iterator[str]:
        """Names of the values the operation reads."""
        for arguments in self.inputs.values():
            yield from (argument for argument in arguments if isinstance(argument, str))


@dataclass(frozen=True, eq=False)
class Function:
    """One function of a program. Operations are ordered: every value is defined before it is read."""

    name: str
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, eq=False)
class Model:
    """A model file: its specification version, its default function and all functions by name."""

    version: int
    default_function: str
    functions: Mapping[str, Function]


def parse_model(data: bytes) -> Model:
    """The ML program in a ``.mlmodel`` file. Raises WireError for anything else."""
    fields = wire.message(memoryview(data))
    program = wire.submessage(fields, 502)
    if program is None:
        raise WireError("it holds no ML program")
    description = wire.submessage(fields, 2) or {}
    functions = {name: _function(name, body) for name, body in _entries(program, 2)}
    if not functions:
        raise WireError("its program has no functions")
    default = wire.text(description, 21) or ("main" if "main" in functions else next(iter(functions)))
    if default not in functions:
        raise WireError(f"its default function {default!r} is not among {', '.join(functions)}")
    return Model(wire.integer(fields, 1), default, functions)


def _entries(fields: Message, number: int) -> Iterator[tuple[str, Message]]:
    for entry in wire.messages(fields, number):
        yield wire.text(entry, 1), wire.submessage(entry, 2) or {}


def _function(name: str, fields: Message) -> Function:
    opset = wire.text(fields, 2)
    blocks = dict(_entries(fields, 3))
    if opset not in blocks:
        raise WireError(f"function {name!r} has no block for its opset {opset!r}")
    if opset not in OPSETS:
        raise WireError(f"function {name!r} uses the unknown opset {opset!r}")
    block = blocks[opset]
    inputs = tuple(_named_type(item) for item in wire.messages(fields, 1))
    operations = tuple(_operation(item) for item in wire.messages(block, 3))
    function = Function(name, inputs, wire.texts(block, 2), operations)
    _check_names(function)
    return function


def _check_names(function: Function) -> None:
    where = f"function {function.name!r}"
    known = {name for name, _ in function.inputs}
    if len(known) != len(function.inputs):
        raise WireError(f"{where} has two inputs of one name")
    for operation in function.operations:
        for name in operation.names():
            if name not in known:
                raise WireError(f"{where}: {operation.kind} {operation.output!r} reads {name!r} before it is defined")
        for name, _ in operation.outputs:
            if name in known:
                raise WireError(f"{where} defines {name!r} twice")
            known.add(name)
    missing = [name for name in function.outputs if name not in known]
    if missing:
        raise WireError(f"{where} returns {missing[0]!r}, which nothing defines")


def _named_type(fields: Message) -> tuple[str, TensorType]:
    kind = wire.submessage(fields, 2)
    name = wire.text(fields, 1)
    parsed = None if kind is None else _type(kind)
    if parsed is None:
        raise WireError(f"{name!r} has a type that is neither a tensor nor a state")
    return name, parsed


def _type(fields: Message, state: bool = False) -> TensorType | None:
    wrapped = wire.submessage(fields, 5)
    if wrapped is not None:
        inner = wire.submessage(wrapped, 1)
        return None if inner is None or state else _type(inner, state=True)
    tensor = wire.submessage(fields, 1)
    if tensor is None:
        return None
    number = wire.integer(tensor, 1)
    if number not in BY_PROTO and number != STRING_PROTO:
        raise WireError(f"element type number {number} is unknown")
    shape: list[int | None] = []
    for dimension in wire.messages(tensor, 3):
        constant = wire.submessage(dimension, 1)
        shape.append(None if constant is None else wire.integer(constant, 1))
        if (shape[-1] or 0) > MAX_SIZE:
            raise WireError(f"a tensor with {shape[-1]} elements along one axis")
    if len(shape) > MAX_RANK:
        raise WireError(f"a tensor of rank {len(shape)}")
    return TensorType(BY_PROTO.get(number), tuple(shape), state)


def _operation(fields: Message) -> Operation:
    kind = wire.text(fields, 1)
    inputs = {}
    for name, argument in _entries(fields, 2):
        bindings: list[Argument] = []
        for binding in wire.messages(argument, 1):
            value = wire.submessage(binding, 2)
            bindings.append(wire.text(binding, 1) if value is None else parse_value(value))
        inputs[name] = tuple(bindings)
    outputs = tuple(_output(item, kind) for item in wire.messages(fields, 3))
    attributes = {name: parse_value(value) for name, value in _entries(fields, 5)}
    return Operation(kind, inputs, outputs, attributes, len(fields.get(4, ())))


def _output(fields: Message, kind: str) -> tuple[str, TensorType]:
    type_fields = wire.submessage(fields, 2) or {}
    # No kernel reads a list of strings. It is kept as a placeholder so that the check of names sees it.
    if kind == "const" and (2 in type_fields or 3 in type_fields):
        return wire.text(fields, 1), TensorType(None, (None,))
    return _named_type(fields)


def parse_value(fields: Message, depth: int = 0) -> Value:
    """A constant. Raises WireError if it does not hold as many elements as its type says."""
    if depth > MAX_NESTING:
        raise WireError(f"a value nested more than {MAX_NESTING} deep")
    kind = wire.submessage(fields, 2)
    value_type = None if kind is None else _type(kind)
    blob = wire.submessage(fields, 5)
    if blob is not None:
        return Value(value_type, BlobRef(wire.text(blob, 1), wire.integer(blob, 2)))
    immediate = wire.submessage(fields, 3) or {}
    for number in (2, 3):
        items = wire.submessage(immediate, number)
        if items is not None:
            return Value(None, tuple(parse_value(item, depth + 1) for item in wire.messages(items, 1)))
    tensor = wire.submessage(immediate, 1)
    if tensor is None or value_type is None:
        raise WireError("a constant is neither a tensor, a tuple nor a list")
    return Value(value_type, _immediate(tensor, value_type))


def _immediate(fields: Message, kind: TensorType) -> Array | str | tuple[Value, ...]:
    strings = wire.submessage(fields, 4)
    if kind.dtype is None:
        values = wire.texts(strings or {}, 1)
        if kind.shape == ():
            return values[0] if values else ""
        return tuple(Value(TensorType(None, ()), value) for value in values)
    if None in kind.shape:
        raise WireError("a constant of unknown shape")
    array = _elements(fields, kind.dtype, kind.count)
    if array.size != kind.count:
        raise WireError(f"a constant of shape {list(kind.shape)} holds {array.size} elements")
    return array.reshape([size or 0 for size in kind.shape])


def _elements(fields: Message, dtype: DType, count: int) -> Array:
    """The elements of an immediate tensor, from whichever of the typed lists holds them."""
    for number, storage in ((1, np.float32), (6, np.float64)):
        packed = wire.submessage(fields, number)
        if packed is not None:
            data = wire.raw(packed, 1)
            if len(data) % np.dtype(storage).itemsize:
                raise WireError("a list of floats ends inside one")
            return np.frombuffer(data, np.dtype(storage).newbyteorder("<")).astype(dtype.storage)
    for number in (2, 3, 5):
        packed = wire.submessage(fields, number)
        if packed is not None:
            return _integers(wire.signed_integers(packed, 1), dtype)
    packed = wire.submessage(fields, 7)
    if packed is not None:
        data = wire.raw(packed, 1)
        if len(data) * 8 < count * dtype.bits:
            raise WireError(f"{len(data)} bytes for {count} elements of {dtype.name}")
        if dtype.packed:
            return unpack(np.frombuffer(data, np.uint8), dtype, count)
        if len(data) % dtype.storage.itemsize:
            raise WireError(f"{len(data)} bytes are not a whole number of {dtype.name} elements")
        return np.frombuffer(data, dtype.storage.newbyteorder("<")).astype(dtype.storage)
    return np.empty(0, dtype.storage)


def _integers(values: list[int], dtype: DType) -> Array:
    wide = np.array(values, np.int64)
    narrow = wide.astype(dtype.storage)
    if not np.array_equal(narrow, wide):
        raise WireError(f"a constant does not fit {dtype.name}")
    return narrow
