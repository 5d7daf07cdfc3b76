"""Reads ``.pte`` files without ExecuTorch: a flatbuffer (its schema/program.fbs), then segments.

ExecuTorch ships accessors for this schema, but importing them loads torch, and they do not check
bounds. It has none for the graphs of XNNPACK (its schema.fbs) in delegates.
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from ssdevice.errors import BundleError, reading

IDENTIFIER = b"ET12"
EXTENDED = b"eh00"
LIMIT = 1 << 20
"""A file with a longer vector is considered damaged."""
KERNEL = 1
DELEGATE = 2
"""Members of the union InstructionArguments that are calls.

The others move values within the program.
"""
SEGMENT = 1
"""DataLocation of delegates whose data is a segment, not part of the flatbuffer."""
QUANTIZED_VALUE = 2
"""Member of the union XValueUnion of XNNPACK's schema that wraps a tensor."""
COREML = "CoreMLBackend"
"""The name of Core ML's backend."""
XNNPACK = b"XH00"
"""Bytes 4 to 7 of the data of a delegate of XNNPACK."""
GRAPHS = (b"XN00", b"XN01")
"""How the flatbuffers in delegates of XNNPACK begin."""
READ = mmap.ACCESS_READ
Data = bytes | mmap.mmap
Found = TypeVar("Found")


def read_program(file: Path, read: "Callable[[Data, Table], Found]") -> Found:
    """The result of ``read`` on a program's bytes and root table.

    Raises BundleError for a damaged file.
    """
    try:
        with (
            reading(file, BundleError),
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=READ) as data,
        ):
            if data[4:8] != IDENTIFIER:
                raise ValueError(f"it does not begin like {IDENTIFIER.decode()} programs")
            root = Table.root(data, 0)
            for entry in root.tables(4):
                segment(data, entry)
            return read(data, root)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        struct.error,
    ) as error:
        raise BundleError(f"{file}: not a whole ExecuTorch program ({error})") from error


def segment(data: Data, entry: "Table") -> tuple[int, int]:
    """A segment's offset in the file and its size."""
    if data[8:12] != EXTENDED:
        raise ValueError("segments without the extended header")
    (first,) = struct.unpack_from("<Q", data, 24)
    start = first + entry.long(0)
    size = entry.long(1)
    if start + size > len(data):
        raise ValueError(f"{len(data)} bytes, a segment ends at {start + size}")
    return start, size


@dataclass(frozen=True)
class Table:
    """A flatbuffer table.

    Fields are read by their number in the schema, where a union counts as two.
    """

    data: Data
    at: int

    @classmethod
    def root(cls, data: Data, at: int) -> Self:
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
        """Offset of the first entry of a vector, and the number of its entries.

        ``width``: bytes of an entry.
        """
        at = self._field(number)
        if at is None:
            return 0, 0
        start = _linked(self.data, at) + 4
        (count,) = struct.unpack_from("<I", self.data, start - 4)
        if (width > 1 and count > LIMIT) or start + width * count > len(self.data):
            raise ValueError(f"{count} entries at {start} of {len(self.data)} bytes")
        return start, count

    def octets(self, number: int) -> bytes:
        start, count = self.vector(number, 1)
        return self.data[start : start + count]

    def integers(self, number: int, kind: str = "i") -> list[int]:
        """A vector of numbers of a kind that ``struct`` knows: 32 bits with a sign."""
        start, count = self.vector(number, struct.calcsize(f"<{kind}"))
        return list(struct.unpack_from(f"<{count}{kind}", self.data, start))

    def text(self, number: int) -> str:
        return self.octets(number).decode("utf-8")

    def table(self, number: int) -> "Table":
        at = self._field(number)
        if at is None:
            raise ValueError(f"field {number} of a table is missing")
        return Table.root(self.data, at)

    def tables(self, number: int) -> "Iterator[Table]":
        start, count = self.vector(number, 4)
        return (Table.root(self.data, at) for at in range(start, start + 4 * count, 4))


def _linked(data: Data, at: int) -> int:
    """Where the offset at ``at`` points."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def has_coreml(file: Path) -> bool:
    """Whether a program has Core ML delegates. Raises BundleError for a damaged file."""
    return read_program(file, lambda _, root: any(is_coreml(plan) for plan in root.tables(1)))


def operators_of(file: Path, function: str) -> set[str]:
    """The kernels that a method of a program needs, as ExecuTorch names them.

    Raises BundleError for a damaged file.
    """

    def names(_: Data, root: Table) -> set[str]:
        found = set()
        for plan in root.tables(1):
            if plan.text(0) == function:
                for entry in plan.tables(6):
                    parts = [entry.text(0), entry.text(1)]
                    found.add(".".join(filter(None, parts)))
        return found

    return read_program(file, names)


def is_coreml(plan: Table) -> bool:
    return any(entry.text(0) == COREML for entry in plan.tables(7))


def instructions(plan: Table) -> Iterator[Table]:
    every = (instruction for chain in plan.tables(5) for instruction in chain.tables(2))
    for number, instruction in enumerate(every, 1):
        if number > LIMIT:  # vectors may be shared, so the size of the file is no bound
            raise ValueError(f"a method of more than {LIMIT} instructions")
        yield instruction


def payload_of(data: Data, program: Table, entry: Table) -> bytes:
    """The data of a delegate of a method, an entry of its vector 7."""
    where = entry.table(1)
    if where.byte(0) == SEGMENT:
        start, size = segment(data, list(program.tables(4))[where.integer(1)])
        return data[start : start + size]
    return list(program.tables(3))[where.integer(1)].octets(0)


def named_segments(program: Table) -> dict[str, Table]:
    """The segments that a program has under a name, such as weights that methods share."""
    segments = list(program.tables(4))
    return {entry.text(0): segments[entry.integer(1)] for entry in program.tables(7)}


class Graph:
    """A graph of XNNPACK, the data of a delegate.

    ``values``: tensors and how they are quantized, by number.
    """

    def __init__(self, entry: Table, data: Data, program: Table) -> None:
        payload = payload_of(data, program, entry)
        if payload[4:8] != XNNPACK:
            raise ValueError(
                f"a delegate of {entry.text(0)[:60]!r} that begins like {payload[4:8]!r}"
            )
        at, size, self.first = struct.unpack_from("<III", payload, 10)
        graph = payload[at : at + size]
        if graph[4:8] not in GRAPHS:
            raise ValueError(f"a graph of XNNPACK that begins like {graph[4:8]!r}")
        self.payload = payload
        self.data = data
        self.named = named_segments(program)
        self.root = Table.root(graph, 0)
        self.constants = list(self.root.tables(8))
        self.values: dict[int, tuple[Table, Table | None]] = {}
        for value in self.root.tables(2):
            quantized = value.table(1) if value.byte(0) == QUANTIZED_VALUE else None
            tensor = quantized.table(0) if quantized is not None else value.table(1)
            self.values[tensor.integer(6)] = tensor, quantized

    def place(self, number: int) -> tuple[Data, int, int]:
        """What holds a constant, its offset there and its size.

        Raises ValueError unless it is there.
        """
        entry = self.constants[number]
        key = entry.text(2)
        size = entry.long(1)
        if key and key not in self.named:
            raise ValueError(f"a constant {key[:60]!r}, which the program does not have")
        own = self.first + entry.long(0)
        start, room = segment(self.data, self.named[key]) if key else (own, len(self.payload) - own)
        if size > room:
            raise ValueError(f"a constant of {size} bytes, in its place are {max(room, 0)}")
        return self.data if key else self.payload, start, size
