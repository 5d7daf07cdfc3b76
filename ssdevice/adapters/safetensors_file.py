"""safetensors files as NumPy arrays, without torch. The library checks a header before it copies anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from ssdevice.errors import InputError, check_no_pointer, first_line, reading

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "|i1"}


def read_floats(file: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor as float32. Raises InputError for another kind of file, or values that are not finite floats."""
    floats = {}
    for name, value in read_tensors(file).items():
        if value.dtype == np.int8:
            raise InputError(f"{file}: tensor {name!r} is I8, expected floats")
        floats[name] = value.astype(np.float32, copy=False)
        if not np.isfinite(floats[name]).all():
            raise InputError(f"{file}: tensor {name!r} has values that are not finite")
    return floats


def read_tensors(file: Path) -> dict[str, NDArray[Any]]:
    """Every tensor in its type, BF16 as float32. Raises InputError for another kind of file or unknown types."""
    check_no_pointer(file)
    try:
        with reading(file):
            tensors = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise InputError(f"{file}: not a safetensors file ({first_line(error)})") from error
    return {name: _array(f"{file}: tensor {name!r}", entry) for name, entry in sorted(tensors)}


def _array(what: str, entry: Mapping[str, Any]) -> NDArray[Any]:
    kind = entry["dtype"]
    if kind not in DTYPES:
        raise InputError(f"{what} is {kind}, expected {', '.join(DTYPES)}")
    flat = np.frombuffer(entry["data"], DTYPES[kind])
    if kind == "BF16":  # the upper half of a float32
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    try:
        return flat.reshape(entry["shape"])
    except ValueError as error:  # nothing, of a shape that NumPy does not have
        raise InputError(f"{what} has shape {str(entry['shape'])[:60]}: {error}") from error


def write_tensors(file: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write tensors of float32, float16 or int8."""
    file.write_bytes(save({name: np.ascontiguousarray(value) for name, value in tensors.items()}))
