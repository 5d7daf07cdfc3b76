"""Reads ``.pte`` files: a flatbuffer (ExecuTorch's schema/program.fbs), then segments. All offsets are checked.

ExecuTorch ships accessors for this schema, but importing them loads torch, and they do not check bounds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ssdevice.errors import BundleError

IDENTIFIER = b"ET12"
EXTENDED = b"eh00"
LIMIT = 1 << 20
"""A file with a longer vector is considered damaged."""
Data = bytes | mmap.mmap
Found = TypeVar("Found")


def read_program(file: Path, read: Callable[[Data, Table], Found]) -> Found:
    """The result of ``read`` on a program's bytes and root table. Raises BundleError for a damaged file."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[4:8] != IDENTIFIER:
                raise ValueError(f"it does not begin like {IDENTIFIER.decode()} programs")
            root = Table.root(data, 0)
            for entry in root.tables(4):
                segment(data, entry)
            return read(data, root)
    except OSError as error:
        raise BundleError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise BundleError(f"{file}: not a whole ExecuTorch program ({error})") from error


def segment(data: Data, entry: Table) -> tuple[int, int]:
    """A segment's offset in the file and its size."""
    if data[8:12] != EXTENDED:
        raise ValueError("segments without the extended header")
    (first,) = struct.unpack_from("<Q", data, 24)
    start, size = first + entry.long(0), entry.long(1)
    if start + size > len(data):
        raise ValueError(f"{len(data)} bytes, a segment ends at {start + size}")
    return start, size


@dataclass(frozen=True)
class Table:
    """A flatbuffer table. Fields are read by their number in the schema, where a union counts as two."""

    data: Data
    at: int

    @classmethod
    def root(cls, data: Data, at: int) -> Table:
        return cls(data, _linked(data, at))

    def _field(self, number: int) -> int | None:
        """Offset of a field; None if it has its default."""
        (back,) = struct.unpack_from("<i", self.data, self._checked(self.at))
        table = self._checked(self.at - back)
        (size,) = struct.unpack_from("<H", self.data, table)
        entry = 4 + 2 * number
        if entry + 2 > size:
            return None
        (offset,) = struct.unpack_from("<H", self.data, table + entry)
        return self._checked(self.at + offset) if offset else None

    def _checked(self, at: int) -> int:
        if not 0 <= at <= len(self.data) - 2:
            raise ValueError(f"an offset of {at} in {len(self.data)} bytes")
        return at

    def has(self, number: int) -> bool:
        """Whether a field is present, not left at its default."""
        return self._field(number) is not None

    def byte(self, number: int) -> int:
        return self._scalar(number, "<B")

    def integer(self, number: int) -> int:
        return self._scalar(number, "<I")

    def long(self, number: int) -> int:
        return self._scalar(number, "<Q")

    def _scalar(self, number: int, kind: str) -> int:
        at = self._field(number)
        return 0 if at is None else int(struct.unpack_from(kind, self.data, at)[0])

    def vector(self, number: int, width: int) -> tuple[int, int]:
        """Offset of the first entry of a vector whose entries have ``width`` bytes, and the number of entries."""
        at = self._field(number)
        if at is None:
            return 0, 0
        start = _linked(self.data, at) + 4
        (count,) = struct.unpack_from("<I", self.data, start - 4)
        if (width > 1 and count > LIMIT) or start + width * count > len(self.data):
            raise ValueError(f"{count} entries at {start} of {len(self.data)} bytes")
        return start, count

    def length(self, number: int) -> int:
        return self.vector(number, 4)[1]

    def octets(self, number: int) -> bytes:
        start, count = self.vector(number, 1)
        return self.data[start : start + count]

    def integers(self, number: int, kind: str = "i") -> list[int]:
        """A vector of numbers of a kind that ``struct`` knows: 32 bits with a sign."""
        start, count = self.vector(number, struct.calcsize(f"<{kind}"))
        return list(struct.unpack_from(f"<{count}{kind}", self.data, start))

    def text(self, number: int) -> str:
        return self.octets(number).decode("utf-8")

    def table(self, number: int) -> Table:
        at = self._field(number)
        if at is None:
            raise ValueError(f"field {number} of a table is missing")
        return Table.root(self.data, at)

    def tables(self, number: int) -> Iterator[Table]:
        start, count = self.vector(number, 4)
        return (Table.root(self.data, at) for at in range(start, start + 4 * count, 4))


def _linked(data: Data, at: int) -> int:
    """Where the offset at ``at`` points."""
    return at + int(struct.unpack_from("<I", data, at)[0])
