"""The contents of a model file as dataclasses: functions, operations, types, constants.

Sources: Model.proto and MIL.proto of coremltools.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ssdevice.mil.weights import BY_PROTO, STRING_PROTO, Array, DType, decode

MAX_RANK = 16
MAX_SIZE = 1 << 31
PROTO = "ssdevice_coreml_proto"
"""Our name of coremltools' package of protobuf classes."""
CONST = "const"
OPSETS = ("CoreML5", "CoreML6", "CoreML7", "CoreML8", "CoreML9")


class ModelFileError(ValueError):
    """A model file that is damaged, or says what no program of ours says."""


@dataclass(frozen=True)
class BlobRef:
    """A constant in the weight file.

    ``file``: as the model spells it. ``offset``: of its metadata, in bytes.
    """

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


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation. ``inputs``: parameter -> names of the values it takes."""

    kind: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: tuple[tuple[str, TensorType], ...]

    @property
    def output(self) -> str:
        """Name of the first output, by which error messages identify the operation."""
        return self.outputs[0][0] if self.outputs else "(no output)"

    @property
    def reads(self) -> Iterator[str]:
        """Names of all values that it takes."""
        return chain.from_iterable(self.inputs.values())


@dataclass(frozen=True, eq=False)
class Function:
    """One function of a program. Every value is defined once, before it is read.

    ``constants`` by name: one that is written into an operation is named
    ``OUTPUT.PARAMETER.INDEX``.
    """

    name: str
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Value]
    operations: tuple[Operation, ...]

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The declared type of every value."""
        types = dict(self.inputs)
        for name, value in self.constants.items():
            types[name] = value.type
        for operation in self.operations:
            types.update(operation.outputs)
        return types

    @cached_property
    def makers(self) -> dict[str, str]:
        """The kind of operation that makes each value that is no input."""
        kinds = dict.fromkeys(self.constants, CONST)
        for operation in self.operations:
            for name, _ in operation.outputs:
                kinds[name] = operation.kind
        return kinds

    def constant(self, operation: Operation, parameter: str) -> Value | None:
        """The constant given for a parameter; None if it is absent, computed or several values."""
        names = operation.inputs.get(parameter, ())
        if len(names) != 1:
            return None
        return self.constants.get(names[0])


@cache
def model_class() -> Any:
    """coremltools' class ``Model`` of Model.proto. Raises ModuleNotFoundError without coremltools.

    It is imported without the rest of coremltools, which imports torch and takes seconds.
    """
    found = find_spec("coremltools")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("coremltools is not installed", name="coremltools")
    file = Path(found.origin).parent / "proto" / "__init__.py"
    spec = spec_from_file_location(PROTO, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[PROTO] = module
    spec.loader.exec_module(module)
    return import_module(f"{PROTO}.Model_pb2").Model


def parse_model(data: bytes) -> tuple[int, Mapping[str, Function]]:
    """The specification version and the functions of the ML program in a ``.mlmodel`` file.

    Raises ModelFileError for anything else, ModuleNotFoundError without coremltools.
    """
    model = model_class()
    try:
        parsed = model.FromString(data)
    except Exception as error:  # DecodeError of whichever protobuf is there
        raise ModelFileError(f"not a protobuf message ({error})") from None
    if not parsed.HasField("mlProgram"):
        raise ModelFileError("it holds no ML program")
    functions = {name: _function(name, body) for name, body in parsed.mlProgram.functions.items()}
    if not functions:
        raise ModelFileError("its program has no functions")
    return parsed.specificationVersion, functions


def _function(name: str, body: Any) -> Function:
    """A function from its protobuf message; raises ModelFileError."""
    where = f"function {name!r}"
    if body.opset not in body.block_specializations:
        raise ModelFileError(f"{where} has no block for its opset {body.opset!r}")
    if body.opset not in OPSETS:
        raise ModelFileError(f"{where} uses the unknown opset {body.opset!r}")
    block = body.block_specializations[body.opset]
    inputs = tuple(map(_named_type, body.inputs))
    constants: list[tuple[str, Value]] = []
    operations = []
    for item in block.operations:
        if item.blocks:
            raise ModelFileError(f"{item.type} has nested blocks")
        if item.type == CONST and item.outputs:
            constants.append((item.outputs[0].name, _value(item.attributes["val"])))
        else:
            outputs = tuple(map(_named_type, item.outputs))
            operations.append(Operation(item.type, _inputs(item, constants), outputs))
    given = [*dict(inputs), *(constant for constant, _ in constants)]
    _check_names(where, given, operations, block.outputs)
    return Function(name, inputs, tuple(block.outputs), dict(constants), tuple(operations))


def _check_names(
    where: str, given: Iterable[str], operations: Iterable[Operation], returned: Iterable[str]
) -> None:
    """Raise ModelFileError unless every value is defined once, before it is read or returned.

    ``given``: names of inputs and constants.
    """
    known: set[str] = set()

    def define(names: Iterable[str]) -> None:
        for name in names:
            if name in known:
                raise ModelFileError(f"{where} defines {name!r} twice")
            known.add(name)

    define(given)
    for operation in operations:
        for name in operation.reads:
            if name not in known:
                raise ModelFileError(
                    f"{where}: {operation.kind} {operation.output!r} reads {name!r} "
                    "before it is defined"
                )
        define(name for name, _ in operation.outputs)
    for name in returned:
        if name not in known:
            raise ModelFileError(f"{where} returns {name!r}, which nothing defines")


def _inputs(item: Any, constants: list[tuple[str, Value]]) -> dict[str, tuple[str, ...]]:
    """Parameter -> names of its values.

    Constants written into the operation are added to ``constants``.
    """
    # By parameter, names of values or constants. Older forms of some operations give their
    # parameters as attributes.
    given: dict[str, list[Any]] = {
        key: [value] for key, value in item.attributes.items() if key != "name"
    }
    for key, argument in item.inputs.items():
        given[key] = [
            each.value if each.HasField("value") else each.name for each in argument.arguments
        ]
    output = item.outputs[0].name if item.outputs else ""
    inputs = dict[str, tuple[str, ...]]()
    for key, arguments in given.items():
        names = list[str]()
        for index, argument in enumerate(arguments):
            if isinstance(argument, str):
                names.append(argument)
            else:
                name = f"{output}.{key}.{index}"
                names.append(name)
                constants.append((name, _value(argument)))
        inputs[key] = tuple(names)
    return inputs


def _named_type(named: Any) -> tuple[str, TensorType]:
    """A value's name and type; raises ModelFileError."""
    parsed = _type(named.type)
    if parsed is None:
        raise ModelFileError(f"{named.name!r} has a type that is neither a tensor nor a state")
    return named.name, parsed


def _type(kind: Any) -> TensorType | None:
    """A type from its protobuf message; None if it is neither a tensor nor a state."""
    state = kind.HasField("stateType")
    if state:
        kind = kind.stateType.wrappedType
    if not kind.HasField("tensorType"):
        return None
    tensor = kind.tensorType
    if tensor.dataType not in BY_PROTO and tensor.dataType != STRING_PROTO:
        raise ModelFileError(f"element type number {tensor.dataType} is unknown")
    if not all(dimension.HasField("constant") for dimension in tensor.dimensions):
        raise ModelFileError("a tensor whose size is only known at run time")
    shape = tuple(dimension.constant.size for dimension in tensor.dimensions)
    if len(shape) > MAX_RANK:
        raise ModelFileError(f"a tensor of rank {len(shape)}")
    if max(shape, default=0) > MAX_SIZE:
        raise ModelFileError(f"a tensor with {max(shape)} elements along one axis")
    return TensorType(BY_PROTO.get(tensor.dataType), shape, state)


def _value(value: Any) -> Value:
    """A constant. Raises ModelFileError if it does not hold as many elements as its type says."""
    kind = _type(value.type)
    if kind is None:
        raise ModelFileError("a constant is not a tensor")
    if value.HasField("blobFileValue"):
        return Value(kind, BlobRef(value.blobFileValue.fileName, value.blobFileValue.offset))
    tensor = value.immediateValue.tensor
    if kind.dtype is None:
        texts = tensor.strings.values
        if kind.shape or len(texts) != 1:
            raise ModelFileError(f"a constant of {len(texts)} strings")
        return Value(kind, texts[0])
    array = _elements(tensor, kind.dtype, kind.count)
    if array.size != kind.count:
        raise ModelFileError(f"a constant of shape {list(kind.shape)} holds {array.size} elements")
    return Value(kind, array.reshape(kind.shape))


def _elements(tensor: Any, dtype: DType, count: int) -> Array:
    """The elements of an immediate tensor, from whichever of the typed lists holds them."""
    held = tensor.WhichOneof("value")
    if held == "floats":
        return np.array(tensor.floats.values, np.float32).astype(dtype.storage)
    if held in ("ints", "bools"):
        wide = np.array(getattr(tensor, held).values, np.int64)
        narrow = wide.astype(dtype.storage)
        if not np.array_equal(narrow, wide):
            raise ModelFileError(f"a constant does not fit {dtype.name}")
        return narrow
    if held == "bytes":
        data = tensor.bytes.values
        if len(data) * 8 < count * dtype.bits:
            raise ModelFileError(f"{len(data)} bytes for {count} elements of {dtype.name}")
        if not dtype.packed and len(data) % dtype.storage.itemsize:
            raise ModelFileError(
                f"{len(data)} bytes are not a whole number of {dtype.name} elements"
            )
        return decode(np.frombuffer(data, np.uint8), dtype, count)
    return np.empty(0, dtype.storage)
