"""Makes the program of a package with many functions smaller: functions do not share graphs, so names take space.

Conversion gives every parameter of every operation a separate constant, and names every value after the path of its
module. Here equal constants of a function become one and values get short names; no computation changes. The names of
matrices are derived from the model's names: see ``short_name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssdevice.errors import SSDeviceError
from ssdevice.export.mlprogram.names import CONST, PREFIX, short_name, weight_key

PROGRAM = "Data/com.apple.CoreML/model.mlmodel"


def compact(package: Path) -> Mapping[str, int]:
    """Make a package's program smaller in place; returns the bytes of each function in it."""
    from coremltools.proto import Model_pb2

    file = package / PROGRAM
    model = Model_pb2.Model()
    model.ParseFromString(file.read_bytes())
    for function in model.mlProgram.functions.values():
        for block in function.block_specializations.values():
            if any(operation.blocks for operation in block.operations):
                raise SSDeviceError(f"{package}: it has nested blocks, which this exporter does not write")
            _share_constants(block)
            _rename(block, {entry.name for entry in function.inputs} | set(block.outputs))
    file.write_bytes(model.SerializeToString(deterministic=True))
    return {name: function.ByteSize() for name, function in model.mlProgram.functions.items()}


def _share_constants(block: Any) -> None:
    """Replace equal constants of a block by one."""
    first: dict[tuple[bytes, bytes], str] = {}
    same: dict[str, str] = {}
    kept = []
    for operation in block.operations:
        if operation.type == CONST and operation.outputs[0].name not in block.outputs:
            name = operation.outputs[0].name
            kind = operation.outputs[0].type.SerializeToString(deterministic=True)
            known = first.setdefault((kind, operation.attributes["val"].SerializeToString(deterministic=True)), name)
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
            key = weight_key(operation.type, output.name) if output.name.startswith(PREFIX) else None
            name = short_name(key) if key is not None else f"v{np.base_repr(len(names), 36).lower()}"
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
    """Make operations read other values."""
    for operation in block.operations:
        for argument in operation.inputs.values():
            for binding in argument.arguments:
                if binding.name in names:
                    binding.name = names[binding.name]
