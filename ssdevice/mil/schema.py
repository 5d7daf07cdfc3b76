"""The contents of a model file as dataclasses: functions, operations, types, constants (Model.proto, MIL.proto)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ssdevice import wire
from ssdevice.mil.dtypes import BY_PROTO, STRING_PROTO, Array, DType, decode
from ssdevice.wire import Message, WireError

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
    """Element type (None for strings), shape, and whether it is a state."""

    dtype: DType | None
    shape: tuple[int, ...]
    state: bool = False

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Value:
    """A constant: ``data`` is an array, a string or a reference into the weight file."""

    type: TensorType
    data: Array | str | BlobRef


Argument = str | Value


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation. Its parameters are names of values or inline constants."""

    kind: str
    inputs: Mapping[str, tuple[Argument, ...]]
    outputs: tuple[tuple[str, TensorType], ...]

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
    """A model file: its specification version and all functions by name."""

    version: int
    functions: Mapping[str, Function]


def parse_model(data: bytes) -> Model:
    """The ML program in a ``.mlmodel`` file. Raises WireError for anything else."""
    fields = wire.message(memoryview(data))
    program = wire.submessage(fields, 502)
    if program is None:
        raise WireError("it holds no ML program")
    functions = {name: _function(name, body) for name, body in _entries(program, 2)}
    if not functions:
        raise WireError("its program has no functions")
    return Model(wire.integer(fields, 1), functions)


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
    shape = []
    for dimension in wire.messages(tensor, 3):
        constant = wire.submessage(dimension, 1)
        if constant is None:
            raise WireError("a tensor whose size is only known at run time")
        shape.append(wire.integer(constant, 1))
        if shape[-1] > MAX_SIZE:
            raise WireError(f"a tensor with {shape[-1]} elements along one axis")
    if len(shape) > MAX_RANK:
        raise WireError(f"a tensor of rank {len(shape)}")
    return TensorType(BY_PROTO.get(number), tuple(shape), state)


def _operation(fields: Message) -> Operation:
    kind = wire.text(fields, 1)
    if 4 in fields:
        raise WireError(f"{kind} has nested blocks")
    # Constants and older forms of some operations give their parameters as attributes.
    inputs: dict[str, tuple[Argument, ...]] = {
        name: (_value(value),) for name, value in _entries(fields, 5) if name != "name"
    }
    for name, argument in _entries(fields, 2):
        bindings: list[Argument] = []
        for binding in wire.messages(argument, 1):
            value = wire.submessage(binding, 2)
            bindings.append(wire.text(binding, 1) if value is None else _value(value))
        inputs[name] = tuple(bindings)
    return Operation(kind, inputs, tuple(_named_type(item) for item in wire.messages(fields, 3)))


def _value(fields: Message) -> Value:
    """A constant. Raises WireError if it does not hold as many elements as its type says."""
    declared = wire.submessage(fields, 2)
    kind = None if declared is None else _type(declared)
    if kind is None:
        raise WireError("a constant is not a tensor")
    blob = wire.submessage(fields, 5)
    if blob is not None:
        return Value(kind, BlobRef(wire.text(blob, 1), wire.integer(blob, 2)))
    tensor = wire.submessage(wire.submessage(fields, 3) or {}, 1) or {}
    if kind.dtype is None:
        texts = wire.texts(wire.submessage(tensor, 4) or {}, 1)
        if kind.shape or len(texts) != 1:
            raise WireError(f"a constant of {len(texts)} strings")
        return Value(kind, texts[0])
    array = _elements(tensor, kind.dtype, kind.count)
    if array.size != kind.count:
        raise WireError(f"a constant of shape {list(kind.shape)} holds {array.size} elements")
    return Value(kind, array.reshape(kind.shape))


def _elements(fields: Message, dtype: DType, count: int) -> Array:
    """The elements of an immediate tensor, from whichever of the typed lists holds them."""
    floats = wire.submessage(fields, 1)
    if floats is not None:
        data = wire.raw(floats, 1)
        if len(data) % 4:
            raise WireError("a list of floats ends inside one")
        return np.frombuffer(data, "<f4").astype(dtype.storage)
    for number in (2, 3):
        integers = wire.submessage(fields, number)
        if integers is not None:
            return _integers(wire.signed_integers(integers, 1), dtype)
    packed = wire.submessage(fields, 7)
    if packed is not None:
        data = wire.raw(packed, 1)
        if len(data) * 8 < count * dtype.bits:
            raise WireError(f"{len(data)} bytes for {count} elements of {dtype.name}")
        if not dtype.packed and len(data) % dtype.storage.itemsize:
            raise WireError(f"{len(data)} bytes are not a whole number of {dtype.name} elements")
        return decode(np.frombuffer(data, np.uint8), dtype, count)
    return np.empty(0, dtype.storage)


def _integers(values: list[int], dtype: DType) -> Array:
    wide = np.array(values, np.int64)
    narrow = wide.astype(dtype.storage)
    if not np.array_equal(narrow, wide):
        raise WireError(f"a constant does not fit {dtype.name}")
    return narrow
