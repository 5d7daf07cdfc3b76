"""Parts of an ExecuTorch program's flatbuffer, read from its file without ExecuTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ssdevice.runtime.executorch.flatbuffer import LIMIT, Data, Table, read_program, segment

KERNEL, DELEGATE = 1, 2
"""Members of the union InstructionArguments that are calls; the others move values within the program."""
SEGMENT = 1
"""DataLocation of delegates whose data is a segment, not part of the flatbuffer."""
QUANTIZED_VALUE = 2
"""Member of the union XValueUnion of XNNPACK's schema that wraps a tensor."""
COREML, XNNPACK = "CoreMLBackend", b"XH00"
"""The name of Core ML's backend, and the bytes 4 to 7 of the data of XNNPACK's."""


def has_coreml(file: Path) -> bool:
    """Whether a program has Core ML delegates. Raises BundleError for a damaged file."""
    return read_program(file, lambda _, root: any(is_coreml(plan) for plan in root.tables(1)))


def operators_of(file: Path, function: str) -> set[str]:
    """The kernels that a method of a program needs, as ExecuTorch names them. Raises BundleError for a damaged file."""

    def names(_: Data, root: Table) -> set[str]:
        entries = (entry for plan in root.tables(1) if plan.text(0) == function for entry in plan.tables(6))
        return {".".join(filter(None, (entry.text(0), entry.text(1)))) for entry in entries}

    return read_program(file, names)


def is_coreml(plan: Table) -> bool:
    """Whether a method has Core ML delegates."""
    return any(entry.text(0) == COREML for entry in plan.tables(7))


def instructions(plan: Table) -> Iterator[Table]:
    """The instructions of a method in order."""
    seen = 0
    for chain in plan.tables(5):
        for instruction in chain.tables(2):
            seen += 1
            if seen > LIMIT:  # vectors may be shared, so the size of the file is no bound
                raise ValueError(f"a method of more than {LIMIT} instructions")
            yield instruction


def payload_of(data: Data, program: Table, entry: Table) -> bytes:
    """The data of a delegate of a method, an entry of its vector 7."""
    where = entry.table(1)
    if where.byte(0) == SEGMENT:
        start, size = segment(data, list(program.tables(4))[where.integer(1)])
        return data[start : start + size]
    return list(program.tables(3))[where.integer(1)].octets(0)
