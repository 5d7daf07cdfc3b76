"""What ``ssdevice inspect`` adds for an ExecuTorch bundle: each method's calls to delegates and to portable kernels,
counted in the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

KERNELS_SHOWN = 8


def describe_program(file: Path) -> dict[str, Any]:
    """A program's methods as plain values; raises BundleError for a damaged file."""
    from ssdevice.runtime.executorch.file import read_calls

    return {
        name: {
            "delegates": [{"backend": one.backend, "operators": one.nodes} for one in found.delegates],
            "breaks": found.breaks,
            "portable_calls": found.kernels.total(),
            "portable_runs": list(found.runs),
            "kernels": dict(found.kernels.most_common()),
        }
        for name, found in read_calls(file).items()
    }


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
