"""Apps as functions of one package: its program made small, and the bytes that an app adds.

Functions do not share graphs, and names take space: conversion gives every parameter of every
operation a constant, and names every value after the path of its module. Here equal constants of a
function become one, and values get short names (those of matrices come from the model's names, see
``short_name``); no computation changes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssdevice.errors import SSDeviceError
from ssdevice.export.exporter import Names
from ssdevice.export.mlprogram.weights import CONST, PREFIX, short_name, weight_key
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import BlobRef
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import LowRank

HALF_BYTES = 2
PROGRAM = "Data/com.apple.CoreML/model.mlmodel"


def adapter_bytes(model: StreamModel) -> int:
    """Size of an app in bytes of float16: LoRA, stream adapters and the streams' own vectors."""
    own = {
        id(p): p for part in model.modules() if isinstance(part, LowRank) for p in part.parameters()
    }
    if model.streams is not None:
        own |= {id(p): p for p in model.streams.parameters()}
    return HALF_BYTES * sum(parameter.numel() for parameter in own.values())


def growth(
    package: Package,
    table: Mapping[str, Names],
    program: Mapping[str, int],
    adapters: Mapping[str, int],
) -> dict[str, str]:
    """By app: a sentence on the bytes that only its functions need, for the manifest's notes.

    ``program``: bytes of each function's graph. ``adapters``: bytes of each app's adapter.
    """
    users: dict[BlobRef, set[str]] = {}
    sizes: dict[BlobRef, int] = {}
    for name, function in package.functions.items():
        for place, size in package.places(function).items():
            users.setdefault(place, set()).add(name)
            sizes[place] = size
    found = {}
    for app, names in table.items():
        others = {
            name for other, theirs in table.items() if other != app for name in theirs.values()
        }
        own = set(names.values()) - others
        weights = sum(sizes[place] for place, functions in users.items() if functions <= own)
        graphs = sum(program[name] for name in own)
        parts = f"{weights} of weights and {graphs} of {len(names)} graphs"
        own_bytes = f"its adapter has {adapters[app]} bytes in float16"
        found[app] = f"app {app} adds {weights + graphs} bytes to the package: {parts}; {own_bytes}"
    return found


def compact(package: Path) -> Mapping[str, int]:
    """Make a package's program smaller in place; returns the bytes of each function in it."""
    from coremltools.proto import Model_pb2

    file = package / PROGRAM
    model = Model_pb2.Model.FromString(file.read_bytes())
    for function in model.mlProgram.functions.values():
        for block in function.block_specializations.values():
            if any(operation.blocks for operation in block.operations):
                raise SSDeviceError(
                    f"{package}: it has nested blocks, which this exporter does not write"
                )
            _share_constants(block)
            _rename(block, {entry.name for entry in function.inputs} | set(block.outputs))
    file.write_bytes(model.SerializeToString(deterministic=True))
    return {name: function.ByteSize() for name, function in model.mlProgram.functions.items()}


def _share_constants(block: Any) -> None:
    first: dict[tuple[bytes, bytes], str] = {}
    same: dict[str, str] = {}
    kept = []
    for operation in block.operations:
        if operation.type == CONST and operation.outputs[0].name not in block.outputs:
            name = operation.outputs[0].name
            kind = operation.outputs[0].type.SerializeToString(deterministic=True)
            known = first.setdefault(
                (kind, operation.attributes["val"].SerializeToString(deterministic=True)), name
            )
            # A matrix is stored once anyway, and the reference looks for it under its own name.
            if known != name and not name.startswith(PREFIX):
                same[name] = known
                continue
        kept.append(operation)
    operations = [type(operation).FromString(operation.SerializeToString()) for operation in kept]
    del block.operations[:]
    block.operations.extend(operations)
    _redirect(block, same)


def _rename(block: Any, fixed: set[str]) -> None:
    """Give short names to all values except ``fixed``, the names in the function's signature."""
    names: dict[str, str] = {}
    taken = set(fixed)
    for operation in block.operations:
        for output in operation.outputs:
            if output.name in fixed:
                continue
            key = (
                weight_key(operation.type, output.name) if output.name.startswith(PREFIX) else None
            )
            name = (
                short_name(key) if key is not None else f"v{np.base_repr(len(names), 36).lower()}"
            )
            while name in taken:
                name += "_"
            names[output.name] = name
            taken.add(name)
    _redirect(block, names)
    for operation in block.operations:
        for output in operation.outputs:
            output.name = names.get(output.name, output.name)
        if "name" in operation.attributes and operation.outputs:
            operation.attributes["name"].immediateValue.tensor.strings.values[0] = (
                operation.outputs[0].name
            )


def _redirect(block: Any, names: Mapping[str, str]) -> None:
    for operation in block.operations:
        for argument in operation.inputs.values():
            for binding in argument.arguments:
                if binding.name in names:
                    binding.name = names[binding.name]
