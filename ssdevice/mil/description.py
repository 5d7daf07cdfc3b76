"""What ``ssdevice inspect`` shows of a Core ML package: operations, weights, memory and warnings about devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

KINDS_SHOWN = 8


def print_package(console: Console, found: dict[str, Any], size: Any) -> None:
    """Print the result of ``audit`` as tables. ``size`` formats a number of bytes."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    functions = Table("function", "rows", "operations", "weights", "most frequent", box=box.SIMPLE, pad_edge=False)
    for name, function in found["functions"].items():
        kinds = ", ".join(f"{kind} {count}" for kind, count in list(function["kinds"].items())[:KINDS_SHOWN])
        functions.add_row(
            escape(name), str(function["rows"]), str(function["operations"]), size(function["weights"]), escape(kinds)
        )
    console.print(functions)
    weights = Table("weights", "tensors", "bytes", box=box.SIMPLE, pad_edge=False)
    for group in found["weights"]:
        weights.add_row(escape(group["form"]), str(group["tensors"]), size(group["bytes"]))
    console.print(weights)
    memory = found["memory"]
    console.print(
        f"memory, estimated: weights {size(memory['weights'])} + state {size(memory['state'])} "
        f"= {size(memory['estimate'])}\n"
    )
    if found["warnings"]:
        console.print("known to go wrong on some devices; measure on yours:")
    for warning in found["warnings"]:
        console.print(
            f"  {warning['code']} ({warning['count']}x, {', '.join(warning['functions'])}): "
            f"{warning['first']}\n    source: {warning['source']}",
            markup=False,
        )
