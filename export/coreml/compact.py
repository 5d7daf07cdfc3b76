"""The program of a package with many functions made small: graphs are not shared between functions, so names count.

Conversion gives every parameter of every operation a constant of its own and every value the path of the module it
came from. Here equal constants of a function become one and values get short names; nothing that is computed changes.
Matrices keep a name that follows from the model's: see ``short_name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssdevice.errors import SSDeviceError
from ssdevice.export.mlprogram.names import CONST, PREFIX, short_name, weight_key

PROGRAM = "Data/com.apple.CoreML/model.mlmodel"


def compact(package: Path) -> Mapping[str, int]:
    """Make a package's program small, in place; the bytes of each function in it."""
    from coremltools.proto import Model_pb2

    file = package / PROGRAM
    model = Model_pb2.Model()
    model.ParseFromString(file.read_bytes())
    for function in model.mlProgram.functions.values():
        for block in function.block_specializations.values():
            if any(operation.blocks for operation in block.operations):
                raise SSDeviceError(f"{package}: nested blocks, which this exporter does not write")
            _share_constants(block)
            _rename(block, {entry.name for entry in function.inputs} | set(block.outputs))
    file.write_bytes(model.SerializeToString(deterministic=True))
    return {name: function.ByteSize() for name, function in model.mlProgram.functions.items()}


def _share_constants(block: Any) -> None:
    """One operation for all equal constants of a block."""
    first: dict[tuple[bytes, bytes], str] = {}
    same: dict[str, str] = {}
    kept = []
    for operation in block.operations:
        if operation.type == CONST and operation.outputs[0].name not in block.outputs:
            name = operation.outputs[0].name
            kind = operation.outputs[0].type.SerializeToString(deterministic=True)
            known = first.setdefault((kind, operation.attributes["val"].SerializeToString(deterministic=True)), name)
            # A matrix that is stored once is one constant already; other names are what the reference looks for.
            if known != name and not name.startswith(PREFIX):
                same[name] = known
                continue
        kept.append(operation)
    operations = [type(operation).FromString(operation.SerializeToString()) for operation in kept]
    del block.operations[:]
    block.operations.extend(operations)
    _redirect(block, same)


def _rename(block: Any, fixed: set[str]) -> None:
    """Short names for all values but ``fixed``, which the function's signature has."""
    names: dict[str, str] = {}
    taken = set(fixed)
    for operation in block.operations:
        for output in operation.outputs:
            if output.name in fixed:
                continue
            key = weight_key(operation.type, output.name) if output.name.startswith(PREFIX) else None
            name = short_name(key) if key is not None else _numbered(len(names))
            while name in taken:
                name += "_"
            names[output.name] = name
            taken.add(name)
    _redirect(block, names)
    for operation in block.operations:
        for output in operation.outputs:
            output.name = names.get(output.name, output.name)
        if "name" in operation.attributes and operation.outputs:
            operation.attributes["name"].immediateValue.tensor.strings.values[0] = operation.outputs[0].name


def _redirect(block: Any, names: Mapping[str, str]) -> None:
    """Let operations read other values."""
    for operation in block.operations:
        for argument in operation.inputs.values():
            for binding in argument.arguments:
                if binding.name in names:
                    binding.name = names[binding.name]


def _numbered(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    text = ""
    while number or not text:
        number, digit = divmod(number, len(digits))
        text = digits[digit] + text
    return f"v{text}"
