"""Element types of MIL programs: their codes in the model file and the weight file, and the NumPy types for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class DType:
    """One element type: ``proto`` is its code in MIL.proto, ``blob`` its code in the weight file (0: never stored
    there), ``bits`` its size when packed, ``storage`` the NumPy type of its unpacked arrays."""

    name: str
    proto: int
    blob: int
    bits: int
    storage: np.dtype[Any]

    @property
    def floating(self) -> bool:
        """True for float16 and float32."""
        return self.storage.kind == "f"

    @property
    def held(self) -> np.dtype[Any]:
        """The NumPy type of its values while a program runs: floats are float32."""
        return np.dtype(np.float32) if self.floating else self.storage

    @property
    def packed(self) -> bool:
        """True if several elements share a byte."""
        return self.bits < 8


# The types of the programs that exports write. Codes from MIL.proto (DataType) and MILBlob/Blob/BlobDataType.hpp of
# coremltools 9.
DTYPES = (
    DType("bool", 1, 0, 8, np.dtype(np.bool_)),
    DType("float16", 10, 1, 16, np.dtype(np.float16)),
    DType("float32", 11, 2, 32, np.dtype(np.float32)),
    DType("int8", 21, 4, 8, np.dtype(np.int8)),
    DType("int16", 22, 6, 16, np.dtype(np.int16)),
    DType("int32", 23, 14, 32, np.dtype(np.int32)),
    DType("int4", 25, 8, 4, np.dtype(np.int8)),
    DType("uint8", 31, 3, 8, np.dtype(np.uint8)),
    DType("uint16", 32, 7, 16, np.dtype(np.uint16)),
    DType("uint4", 35, 11, 4, np.dtype(np.uint8)),
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_PROTO = {dtype.proto: dtype for dtype in DTYPES}
BY_BLOB = {dtype.blob: dtype for dtype in DTYPES if dtype.blob}
STRING_PROTO = 2


def decode(data: Array, dtype: DType, count: int) -> Array:
    """``count`` elements from little-endian bytes ``data`` [ceil(count·bits/8)] uint8: a view, or a copy if they are
    packed. Elements of fewer than 8 bits are packed, lowest bits first."""
    if not dtype.packed:
        return data.view(dtype.storage.newbyteorder("<"))
    bits = np.unpackbits(data, bitorder="little", count=count * dtype.bits).reshape(count, dtype.bits)
    values = np.packbits(bits, axis=1, bitorder="little")[:, 0]
    if dtype.storage.kind == "u":
        return values
    shift = 8 - dtype.bits
    return (values << shift).view(np.int8) >> shift
