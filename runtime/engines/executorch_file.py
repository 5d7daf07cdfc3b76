"""What an ExecuTorch program holds, read from its file alone: calls of each method, to delegates and to kernels.

A ``.pte`` file is a flatbuffer (ExecuTorch's schema/program.fbs), then segments; what XNNPACK made of the operators it
took lies in a segment of its own, again a flatbuffer. Only what is counted here is followed, every offset is checked,
and nothing of ExecuTorch is needed.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ssdevice.errors import BundleError

IDENTIFIER = b"ET12"
EXTENDED = b"eh00"
KERNEL, DELEGATE = 1, 2
"""Members of the union InstructionArguments that are calls; the others move values within the program."""
JUMP = "jump"
OTHERS = {3: "move", 4: JUMP, 5: "free"}
SEGMENT = 1
"""DataLocation: a delegate's data are a segment rather than part of the flatbuffer."""
XNNPACK = b"XH00"
LIMIT = 1 << 20
"""Entries of a vector beyond which a file is taken for damaged."""


@dataclass(frozen=True)
class DelegateCalls:
    """A delegate of a method. ``nodes``: operators in it; None for another backend than XNNPACK."""

    backend: str
    nodes: int | None


@dataclass(frozen=True)
class MethodCalls:
    """What one method calls, in order. ``kernels``: portable calls by operator; ``runs``: calls of kernels in a row.

    ``runs`` begins with those before the first delegate and ends with those after the last. ``instructions``: calls of
    delegates, names of kernels and of ``OTHERS``; ``counts_at``: where the file says how many they are, a uint32 for
    each chain of them.
    """

    delegates: tuple[DelegateCalls, ...]
    kernels: Counter[str]
    runs: tuple[int, ...]
    instructions: tuple[str | DelegateCalls, ...]
    counts_at: tuple[int, ...]

    @property
    def breaks(self) -> int:
        """Places where kernels run between two delegates."""
        return sum(count > 0 for count in self.runs[1:-1])


def read_calls(file: Path) -> dict[str, MethodCalls]:
    """The methods of a program that take inputs, by name; raises BundleError for a file that is no whole program."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BundleError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        if data[4:8] != IDENTIFIER:
            raise ValueError(f"it does not begin as {IDENTIFIER.decode()} programs do")
        program = _Table.root(data, 0)
        for segment in program.tables(4):
            _segment(data, segment)
        plans = [(plan.text(0), plan) for plan in program.tables(1)]
        return {name: _calls(data, program, plan) for name, plan in plans if plan.length(3)}
    except (ValueError, IndexError, struct.error) as error:
        raise BundleError(f"{file}: not a whole ExecuTorch program ({error})") from error


def _calls(data: bytes, program: _Table, plan: _Table) -> MethodCalls:
    operators = [_operator(entry) for entry in plan.tables(6)]
    delegates = [_delegate(data, program, entry) for entry in plan.tables(7)]
    made: list[str | DelegateCalls] = []
    kernels, runs, counts_at = Counter[str](), [0], []
    for chain in plan.tables(5):
        start, _ = chain.vector(2)
        counts_at.append(start - 4)
        for instruction in chain.tables(2):
            if len(made) >= LIMIT:  # vectors may be shared, so the file's size does not bound this
                raise ValueError(f"a method of more than {LIMIT} instructions")
            kind = instruction.byte(0)
            if kind == DELEGATE:
                made.append(delegates[_index(instruction.table(1).integer(0))])
                runs.append(0)
            elif kind == KERNEL:
                operator = operators[_index(instruction.table(1).integer(0))]
                made.append(operator)
                kernels[operator] += 1
                runs[-1] += 1
            else:
                made.append(OTHERS.get(kind, "?"))
    called = tuple(one for one in made if isinstance(one, DelegateCalls))
    return MethodCalls(called, kernels, tuple(runs), tuple(made), tuple(counts_at))


def _index(number: int) -> int:
    if number < 0:
        raise ValueError(f"an index of {number}")
    return number


def _operator(entry: _Table) -> str:
    name, overload = entry.text(0), entry.text(1)
    return f"{name}.{overload}" if overload else name


def _delegate(data: bytes, program: _Table, entry: _Table) -> DelegateCalls:
    where = entry.table(1)
    if where.byte(0) == SEGMENT:
        start, size = _segment(data, list(program.tables(4))[_index(where.integer(1))])
        payload = data[start : start + size]
    else:
        payload = list(program.tables(3))[_index(where.integer(1))].octets(0)
    return DelegateCalls(entry.text(0), _xnnpack_nodes(payload))


def _segment(data: bytes, entry: _Table) -> tuple[int, int]:
    """Where a segment begins in the file, and its size."""
    if data[8:12] != EXTENDED:
        raise ValueError("segments without a header that says where")
    (first,) = struct.unpack_from("<Q", data, 24)
    start, size = first + entry.long(0), entry.long(1)
    if start + size > len(data):
        raise ValueError(f"{len(data)} bytes, a segment ends at {start + size}")
    return start, size


def _xnnpack_nodes(payload: bytes) -> int | None:
    if payload[4:8] != XNNPACK:
        return None
    offset, size = struct.unpack_from("<II", payload, 10)
    return _Table.root(payload[offset : offset + size], 0).length(1)


@dataclass(frozen=True)
class _Table:
    """A flatbuffer table; fields by their number in the schema, which counts both parts of a union."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes, at: int) -> _Table:
        return cls(data, at + _unsigned(data, at))

    def _field(self, number: int) -> int | None:
        """Where a field lies; None if it is left at its default."""
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

    def byte(self, number: int) -> int:
        at = self._field(number)
        return 0 if at is None else self.data[at]

    def integer(self, number: int) -> int:
        at = self._field(number)
        return 0 if at is None else int(struct.unpack_from("<i", self.data, at)[0])

    def long(self, number: int) -> int:
        at = self._field(number)
        return 0 if at is None else int(struct.unpack_from("<Q", self.data, at)[0])

    def vector(self, number: int) -> tuple[int, int]:
        """Where the entries of a vector begin, and how many there are."""
        at = self._field(number)
        if at is None:
            return 0, 0
        start = at + _unsigned(self.data, at)
        return start + 4, _unsigned(self.data, self._checked(start))

    def length(self, number: int) -> int:
        return self.vector(number)[1]

    def octets(self, number: int) -> bytes:
        start, count = self.vector(number)
        if start + count > len(self.data):
            raise ValueError(f"{count} bytes at {start} of {len(self.data)}")
        return self.data[start : start + count]

    def text(self, number: int) -> str:
        return self.octets(number).decode("utf-8")

    def table(self, number: int) -> _Table:
        at = self._field(number)
        if at is None:
            raise ValueError(f"field {number} of a table is missing")
        return _Table(self.data, at + _unsigned(self.data, at))

    def tables(self, number: int) -> Iterator[_Table]:
        start, count = self.vector(number)
        if count > LIMIT or start + 4 * count > len(self.data):
            raise ValueError(f"{count} entries at {start} of {len(self.data)} bytes")
        for at in range(start, start + 4 * count, 4):
            yield _Table(self.data, at + _unsigned(self.data, at))


def _unsigned(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])
