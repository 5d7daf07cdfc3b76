"""Element types of MIL programs: their codes in the model file and the weight file, and the NumPy types for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class DType:
    """One element type.

    ``proto`` is its code in MIL.proto, ``blob`` its code in the weight file (0: never stored there), ``bits``
    its size when packed and ``storage`` the NumPy type of its unpacked arrays.
    """

    name: str
    proto: int
    blob: int
    bits: int
    storage: np.dtype[Any]

    @property
    def floating(self) -> bool:
        """True for float16, float32 and float64."""
        return self.storage.kind == "f"

    @property
    def packed(self) -> bool:
        """True if several elements share a byte."""
        return self.bits < 8


def _dtype(name: str, proto: int, blob: int, bits: int, storage: type) -> DType:
    return DType(name, proto, blob, bits, np.dtype(storage))


# Codes from MIL.proto (DataType) and MILBlob/Blob/BlobDataType.hpp of coremltools 9.
DTYPES = (
    _dtype("bool", 1, 0, 8, np.bool_),
    _dtype("float16", 10, 1, 16, np.float16),
    _dtype("float32", 11, 2, 32, np.float32),
    _dtype("float64", 12, 0, 64, np.float64),
    _dtype("int8", 21, 4, 8, np.int8),
    _dtype("int16", 22, 6, 16, np.int16),
    _dtype("int32", 23, 14, 32, np.int32),
    _dtype("int64", 24, 0, 64, np.int64),
    _dtype("int4", 25, 8, 4, np.int8),
    _dtype("uint8", 31, 3, 8, np.uint8),
    _dtype("uint16", 32, 7, 16, np.uint16),
    _dtype("uint32", 33, 15, 32, np.uint32),
    _dtype("uint64", 34, 0, 64, np.uint64),
    _dtype("uint4", 35, 11, 4, np.uint8),
    _dtype("uint2", 36, 10, 2, np.uint8),
    _dtype("uint1", 37, 9, 1, np.uint8),
    _dtype("uint6", 38, 13, 6, np.uint8),
    _dtype("uint3", 39, 12, 3, np.uint8),
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_PROTO = {dtype.proto: dtype for dtype in DTYPES}
BY_BLOB = {dtype.blob: dtype for dtype in DTYPES if dtype.blob}
STRING_PROTO = 2

# The names that cast and similar operations use.
CAST_NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}


def unpack(data: Array, dtype: DType, count: int) -> Array:
    """Unpack ``count`` elements of a sub-byte type from ``data`` [ceil(count·bits/8)] uint8, lowest bits first."""
    bits = np.unpackbits(data, bitorder="little", count=count * dtype.bits).reshape(count, dtype.bits)
    values = np.packbits(bits, axis=1, bitorder="little")[:, 0]
    if dtype.storage.kind == "u":
        return values
    shift = 8 - dtype.bits
    return (values << shift).view(np.int8) >> shift
