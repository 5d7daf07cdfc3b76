"""What ``ssdevice inspect`` adds for an ExecuTorch bundle: each method's calls to delegates and to portable kernels,
counted in the file.

XNNPACK stores the operators that it took in a separate segment, again a flatbuffer. Only what is counted here is read.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.runtime.executorch.file import DELEGATE, KERNEL, XNNPACK, instructions, payload_of
from ssdevice.runtime.executorch.flatbuffer import Data, Table, read_program

if TYPE_CHECKING:
    from rich.console import Console

KERNELS_SHOWN = 8


def describe_program(file: Path) -> dict[str, Any]:
    """The methods of a program that take inputs, by name, as plain values. Raises BundleError for a damaged file.

    ``operators``: number of operators in a delegate; None for other backends than XNNPACK. ``portable_runs``: the
    number of kernel calls before the first delegate, between delegates, and after the last one; ``breaks``: the places
    between two delegates that have any. ``kernels``: portable calls by operator, most frequent first.
    """

    def methods(data: Data, program: Table) -> dict[str, Any]:
        plans = [(plan.text(0), plan) for plan in program.tables(1)]
        return {name: _calls(data, program, plan) for name, plan in plans if plan.length(3)}

    return read_program(file, methods)


def _calls(data: Data, program: Table, plan: Table) -> dict[str, Any]:
    operators = [_operator(entry) for entry in plan.tables(6)]
    delegates = [
        {"backend": entry.text(0), "operators": _xnnpack_nodes(payload_of(data, program, entry))}
        for entry in plan.tables(7)
    ]
    called: list[dict[str, Any]] = []
    kernels, runs = Counter[str](), [0]
    for instruction in instructions(plan):
        kind = instruction.byte(0)
        if kind == DELEGATE:
            called.append(delegates[instruction.table(1).integer(0)])
            runs.append(0)
        elif kind == KERNEL:
            kernels[operators[instruction.table(1).integer(0)]] += 1
            runs[-1] += 1
    return {
        "delegates": called,
        "breaks": sum(count > 0 for count in runs[1:-1]),
        "portable_calls": kernels.total(),
        "portable_runs": runs,
        "kernels": dict(kernels.most_common()),
    }


def _operator(entry: Table) -> str:
    name, overload = entry.text(0), entry.text(1)
    return f"{name}.{overload}" if overload else name


def _xnnpack_nodes(payload: bytes) -> int | None:
    if payload[4:8] != XNNPACK:
        return None
    offset, size = struct.unpack_from("<II", payload, 10)
    return Table.root(payload[offset : offset + size], 0).length(1)


def print_program(console: Console, methods: dict[str, Any]) -> None:
    """Print the result of ``describe_program`` as a table, then the most frequent kernels of each method."""
    from rich import box
    from rich.table import Table

    columns = ("method", "delegates", "operators inside", "breaks", "portable calls")
    table = Table(*columns, box=box.SIMPLE, pad_edge=False)
    for name, found in methods.items():
        inside = [str(one["operators"]) if one["operators"] is not None else "?" for one in found["delegates"]]
        backends = ", ".join(sorted({one["backend"] for one in found["delegates"]}))
        counts = str(found["breaks"]), str(found["portable_calls"])
        table.add_row(name, f"{len(inside)} {backends}".strip(), " + ".join(inside), *counts)
    console.print(table)
    for name, found in methods.items():
        most = list(found["kernels"].items())[:KERNELS_SHOWN]
        said = ", ".join(f"{kernel.split('::')[-1].split('.')[0]} {count}" for kernel, count in most)
        rest = sum(found["kernels"].values()) - sum(count for _, count in most)
        console.print(f"outside in {name}: {said}" + (f", others {rest}" if rest else ""), markup=False)
