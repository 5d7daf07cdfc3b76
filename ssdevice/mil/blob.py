"""The weight file of a ``.mlpackage`` (MILBlob, version 2), read without coremltools.

The file is a 64-byte header (number of entries, version) followed by entries. An entry is 64 bytes of metadata
(sentinel, element type, size in bytes, offset of the data, unused bits at its end) and the data; both are 64-aligned.
The program names an entry by the offset of its metadata. Elements of fewer than 8 bits are packed, lowest bits first.
Source: mlmodel/src/MILBlob/Blob/StorageFormat.hpp and BlobDataType.hpp of coremltools 9.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np

from ssdevice.errors import BundleError, reading
from ssdevice.mil.dtypes import BY_BLOB, Array, DType

ALIGNMENT = 64
SENTINEL = 0xDEADBEEF
VERSION = 2
_HEADER = struct.Struct("<II56x")
_METADATA = struct.Struct("<IIQQQ32x")


class BlobFile:
    """A memory-mapped weight file. Raises BundleError if the file is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, BundleError), path.open("rb") as file:
            size = file.seek(0, 2)
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        if size < _HEADER.size:
            raise BundleError(f"{path}: a weight file of {size} bytes is shorter than its header; export again")
        self.size = size
        _, version = _HEADER.unpack_from(self._data, 0)
        if version != VERSION:
            raise BundleError(f"{path}: weight storage version {version}, expected {VERSION}")

    def data(self, offset: int, dtype: DType, count: int) -> Array:
        """The bytes [size] uint8 of the entry with metadata at ``offset``, which must hold ``count`` of ``dtype``.

        Raises BundleError if the metadata, the type, the size or the bounds of the data are wrong.
        """
        where = f"{self.path}: the weight at offset {offset}"
        if offset % ALIGNMENT or offset < _HEADER.size or offset + _METADATA.size > self.size:
            raise BundleError(f"{where} lies outside the file's {self.size} bytes or is not {ALIGNMENT}-aligned")
        sentinel, number, size, start, padding = _METADATA.unpack_from(self._data, offset)
        if sentinel != SENTINEL:
            raise BundleError(f"{where} has no metadata; the program and its weight file do not belong together")
        stored = BY_BLOB.get(number)
        if stored is not dtype:
            raise BundleError(f"{where} is {stored.name if stored else f'of type {number}'}, expected {dtype.name}")
        needed = -(-count * dtype.bits // 8)
        # Packed data is rounded up to whole bytes; `padding` is the number of unused bits.
        if size != needed or (dtype.packed and size * 8 - padding != count * dtype.bits):
            raise BundleError(f"{where} has {size} bytes, {count} elements of {dtype.name} need {needed}")
        if start % ALIGNMENT or start < _HEADER.size or start > self.size or size > self.size - start:
            raise BundleError(
                f"{where} needs bytes {start}..{start + size}, the file has {self.size}: it was cut short or edited"
            )
        return np.frombuffer(self._data, np.uint8, size, start)
