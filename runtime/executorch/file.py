"""The contents of an ExecuTorch program, read from its file without ExecuTorch: each method's calls to delegates and
kernels.

XNNPACK stores the operators that it took in a separate segment, again a flatbuffer. Only what is counted here is read.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ssdevice.runtime.executorch.flatbuffer import LIMIT, Data, Table, read_program, segment

KERNEL, DELEGATE = 1, 2
"""Members of the union InstructionArguments that are calls; the others move values within the program."""
SEGMENT = 1
"""DataLocation of delegates whose data is a segment, not part of the flatbuffer."""
XNNPACK = b"XH00"
COREML = "CoreMLBackend"


@dataclass(frozen=True)
class DelegateCalls:
    """A delegate of a method. ``nodes``: number of its operators; None for other backends than XNNPACK."""

    backend: str
    nodes: int | None


@dataclass(frozen=True)
class MethodCalls:
    """The calls of one method. ``kernels``: portable calls by operator.

    ``runs``: the number of kernel calls before the first delegate, between delegates, and after the last one.
    """

    delegates: tuple[DelegateCalls, ...]
    kernels: Counter[str]
    runs: tuple[int, ...]

    @property
    def breaks(self) -> int:
        """Places where kernels run between two delegates."""
        return sum(count > 0 for count in self.runs[1:-1])


def read_calls(file: Path) -> dict[str, MethodCalls]:
    """The methods of a program that take inputs, by name. Raises BundleError for a damaged file."""
    return read_program(file, _methods)


def has_coreml(file: Path) -> bool:
    """Whether a program has Core ML delegates. Raises BundleError for a damaged file."""
    return read_program(file, lambda _, root: any(is_coreml(plan) for plan in root.tables(1)))


def is_coreml(plan: Table) -> bool:
    """Whether a method has Core ML delegates."""
    return any(entry.text(0) == COREML for entry in plan.tables(7))


def _methods(data: Data, program: Table) -> dict[str, MethodCalls]:
    plans = [(plan.text(0), plan) for plan in program.tables(1)]
    return {name: _calls(data, program, plan) for name, plan in plans if plan.length(3)}


def _calls(data: Data, program: Table, plan: Table) -> MethodCalls:
    operators = [_operator(entry) for entry in plan.tables(6)]
    delegates = [_delegate(data, program, entry) for entry in plan.tables(7)]
    called: list[DelegateCalls] = []
    kernels, runs = Counter[str](), [0]
    for instruction in instructions(plan):
        kind = instruction.byte(0)
        if kind == DELEGATE:
            called.append(delegates[_index(instruction.table(1).integer(0))])
            runs.append(0)
        elif kind == KERNEL:
            kernels[operators[_index(instruction.table(1).integer(0))]] += 1
            runs[-1] += 1
    return MethodCalls(tuple(called), kernels, tuple(runs))


def instructions(plan: Table) -> Iterator[Table]:
    """The instructions of a method in order."""
    seen = 0
    for chain in plan.tables(5):
        for instruction in chain.tables(2):
            seen += 1
            if seen > LIMIT:  # vectors may be shared, so the size of the file is no bound
                raise ValueError(f"a method of more than {LIMIT} instructions")
            yield instruction


def _index(number: int) -> int:
    if number < 0:
        raise ValueError(f"an index of {number}")
    return number


def _operator(entry: Table) -> str:
    name, overload = entry.text(0), entry.text(1)
    return f"{name}.{overload}" if overload else name


def _delegate(data: Data, program: Table, entry: Table) -> DelegateCalls:
    return DelegateCalls(entry.text(0), _xnnpack_nodes(payload_of(data, program, entry)))


def payload_of(data: Data, program: Table, entry: Table) -> bytes:
    """The data of a delegate of a method, an entry of its vector 7."""
    where = entry.table(1)
    if where.byte(0) == SEGMENT:
        start, size = segment(data, list(program.tables(4))[_index(where.integer(1))])
        return data[start : start + size]
    return list(program.tables(3))[_index(where.integer(1))].octets(0)


def _xnnpack_nodes(payload: bytes) -> int | None:
    if payload[4:8] != XNNPACK:
        return None
    offset, size = struct.unpack_from("<II", payload, 10)
    return Table.root(payload[offset : offset + size], 0).length(1)
