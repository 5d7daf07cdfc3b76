"""safetensors files as NumPy arrays, for hosts without torch. Every bound is checked before it is used."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.errors import InputError, check_no_pointer

MAX_HEADER = 100_000_000
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "|i1"}
WRITTEN = {np.dtype(DTYPES[kind]): kind for kind in ("F32", "F16", "I8")}


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
    try:
        check_no_pointer(file)
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        (size,) = struct.unpack_from("<Q", data)
        if size > min(len(data) - 8, MAX_HEADER):
            raise InputError(f"{file}: its header claims {size} bytes, more than the file has")
        header = json.loads(data[8 : 8 + size])
        body = memoryview(data)[8 + size :]
        return {
            name: _tensor(f"{file}: tensor {name!r}", entry, body)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: not a safetensors file ({error})") from error


def _tensor(what: str, entry: dict[str, Any], body: memoryview) -> NDArray[Any]:
    kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in DTYPES:
        raise InputError(f"{what} is {str(kind)[:20]}, expected {', '.join(DTYPES)}")
    if any(type(size) is not int or size < 0 for size in (*shape, begin, end)):
        raise InputError(f"{what} has a shape or offsets that are not whole numbers")
    width = np.dtype(DTYPES[kind]).itemsize
    if not begin <= end <= len(body) or end - begin != prod(shape) * width:
        raise InputError(f"{what} claims bytes {begin} to {end}, which do not hold its shape {shape}")
    flat = np.frombuffer(body[begin:end], DTYPES[kind])
    if kind == "BF16":  # the upper half of a float32
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return np.array(flat).reshape(shape)  # a copy, because callers need writable memory


def write_tensors(file: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write tensors of float32, float16 or int8, sorted by name."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name in sorted(tensors):
        value = tensors[name]
        kind = WRITTEN[value.dtype]
        parts.append(np.ascontiguousarray(value, DTYPES[kind]).tobytes())
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [at, at + len(parts[-1])]}
        at += len(parts[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin aligned
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
