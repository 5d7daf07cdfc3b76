"""Element types of MIL programs, and the weight file of a ``.mlpackage`` (MILBlob, version 2).

The file is a 64-byte header (number of entries, version) followed by entries. An entry is 64 bytes
of metadata (sentinel, element type, size in bytes, offset of the data, unused bits at its end) and
the data; both are 64-aligned. The program names an entry by the offset of its metadata. Elements of
fewer than 8 bits are packed, lowest bits first. Source: mlmodel/src/MILBlob/Blob/StorageFormat.hpp
and BlobDataType.hpp of coremltools 9.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ssdevice.errors import BundleError, reading

Array: TypeAlias = NDArray[Any]
ALIGNMENT = 64
SENTINEL = 0xDEADBEEF
VERSION = 2
_HEADER = struct.Struct("<II56x")
_METADATA = struct.Struct("<IIQQQ32x")


@dataclass(frozen=True)
class DType:
    """One element type.

    - ``proto``: its code in MIL.proto (DataType).
    - ``blob``: its code in the weight file (0: never stored there).
    - ``bits``: of a packed element.
    - ``storage``: the NumPy type of unpacked arrays.
    """

    name: str
    proto: int
    blob: int
    bits: int
    storage: np.dtype[Any]

    @property
    def floating(self) -> bool:
        """Whether it is float16 or float32."""
        return self.storage.kind == "f"

    @property
    def held(self) -> np.dtype[Any]:
        """The NumPy type of its values while a program runs: floats are float32."""
        return np.dtype(np.float32) if self.floating else self.storage

    @property
    def packed(self) -> bool:
        """Whether elements share a byte."""
        return self.bits < 8

    def bytes(self, count: int) -> int:
        """Bytes of ``count`` elements."""
        return (count * self.bits + 7) // 8


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
    """``count`` elements from their little-endian bytes ``data [bytes] uint8``.

    A view, or a copy if they are packed.
    """
    if not dtype.packed:
        return data.view(dtype.storage.newbyteorder("<"))
    bits = np.unpackbits(data, bitorder="little", count=count * dtype.bits)
    by_element = bits.reshape(count, dtype.bits)
    values = np.packbits(by_element, axis=1, bitorder="little")[:, 0]
    if dtype.storage.kind == "u":
        return values
    shift = 8 - dtype.bits
    return (values << shift).view(np.int8) >> shift


class BlobFile:
    """A memory-mapped weight file. Raises BundleError if the file is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, BundleError), path.open("rb") as file:
            size = file.seek(0, 2)
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        if size < _HEADER.size:
            raise BundleError(
                f"{path}: a weight file of {size} bytes is shorter than its header; export again"
            )
        self.size = size
        _, version = _HEADER.unpack_from(self._data, 0)
        if version != VERSION:
            raise BundleError(f"{path}: weight storage version {version}, expected {VERSION}")

    def data(self, offset: int, dtype: DType, count: int) -> Array:
        """The bytes [size] uint8 of the entry with metadata at ``offset``.

        It must hold ``count`` elements of ``dtype``. Raises BundleError if the metadata, the type,
        the size or the bounds of the data are wrong.
        """
        where = f"{self.path}: the weight at offset {offset}"
        if offset % ALIGNMENT or offset < _HEADER.size or offset + _METADATA.size > self.size:
            raise BundleError(
                f"{where} lies outside the file's {self.size} bytes or is not {ALIGNMENT}-aligned"
            )
        sentinel, number, size, start, padding = _METADATA.unpack_from(self._data, offset)
        if sentinel != SENTINEL:
            raise BundleError(
                f"{where} has no metadata; the program and its weight file do not belong together"
            )
        stored = BY_BLOB.get(number)
        if stored is not dtype:
            found = f"of type {number}" if stored is None else stored.name
            raise BundleError(f"{where} is {found}, expected {dtype.name}")
        needed = dtype.bytes(count)
        # Packed data is rounded up to whole bytes; `padding` is the number of unused bits.
        if size != needed or (dtype.packed and size * 8 - padding != count * dtype.bits):
            raise BundleError(
                f"{where} has {size} bytes, {count} elements of {dtype.name} need {needed}"
            )
        inside = _HEADER.size <= start <= self.size and size <= self.size - start
        if start % ALIGNMENT or not inside:
            raise BundleError(
                f"{where} needs bytes {start}..{start + size}, the file has {self.size}: "
                "it was cut short or edited"
            )
        return np.frombuffer(self._data, np.uint8, size, start)
