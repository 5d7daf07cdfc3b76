"""``ssdevice inspect --time``: what the delegates and the portable operators of an ExecuTorch bundle take."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ssdevice.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from ssdevice.bundle.folder import Bundle
    from ssdevice.runtime.executorch.timing import MethodTimes, Part

SHOWN = 12
OUTSIDE = "the call itself"
LOADED = 0.01
"""Standard error of an operator's time, of a whole call, beyond which the machine was not quiet enough."""


def check_timed(bundle: Bundle) -> None:
    """Raise InputError for a bundle whose delegates cannot run here."""
    from ssdevice.runtime.executorch.engine import PROGRAM
    from ssdevice.runtime.executorch.file import has_coreml

    if has_coreml(bundle.file(PROGRAM)) and sys.platform != "darwin":
        raise InputError(f"--time: the Core ML delegates of {bundle.folder} run on Apple's systems alone")


def describe_times(
    bundle: Bundle, threads: int, committed: int | None, report: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Times as plain values, in ms: by method, its delegates in order, then its operators, slowest first.

    ``instructions``: each one in order, or what was timed as one. ``valid``: the rounds agree.
    """
    from ssdevice.runtime.engine import EngineOptions
    from ssdevice.runtime.executorch.timing import time_methods

    rows = bundle.geometry.context // 2 if committed is None else committed
    found = time_methods(bundle, EngineOptions(threads=threads), rows, report)
    return {
        "threads": threads,
        "committed": rows,
        "methods": {name: _method(times) for name, times in found.items()},
    }


def _method(times: MethodTimes) -> dict[str, Any]:
    names = dict.fromkeys(part.name for part in times.parts)
    groups = [_group(name, [part for part in times.parts if part.name == name]) for name in names]
    delegates = [group for group in groups if _delegate(group["name"])]
    kernels = sorted((group for group in groups if not _delegate(group["name"])), key=lambda group: -group["ms"])
    errors = [group.pop("error") for group in groups]
    error = math.sqrt(sum(one**2 for one in errors) / max(1, len(errors)))
    return {
        "whole_ms": times.whole * 1e3,
        "outside_ms": times.outside * 1e3,
        "delegates_ms": sum(group["ms"] for group in delegates),
        "kernels_ms": sum(group["ms"] for group in kernels),
        "error_ms": error,
        "valid": error < LOADED * times.whole * 1e3,
        "rounds": times.rounds,
        "parts": delegates + kernels,
        "instructions": [{"name": part.name, "ms": part.seconds * 1e3} for part in times.parts],
    }


def _group(name: str, parts: Sequence[Part]) -> dict[str, Any]:
    ms, apart = sum(part.seconds for part in parts) * 1e3, sum(part.apart for part in parts) * 1e3
    return {"name": name, "calls": sum(part.calls for part in parts), "ms": ms, "error": apart / 2}


def _delegate(name: str) -> bool:
    return name.startswith("delegate ")


def print_times(console: Console, times: dict[str, Any]) -> None:
    """``describe_times`` as a table for each method, whose parts add up to a whole call."""
    from rich import box
    from rich.table import Table

    console.print(f"times: {times['threads'] or 'default'} threads, {times['committed']} tokens in the cache")
    for name, found in times["methods"].items():
        whole = found["whole_ms"]
        title = f"{name}: {whole:.3f} ms, ± {found['error_ms']:.3f} a row, {found['rounds']} rounds"
        table = Table("part", "calls", "ms", "share", title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)

        def add(part: str, calls: int, ms: float, table: Table = table, whole: float = whole) -> None:
            table.add_row(part, str(calls or ""), f"{ms:.3f}", f"{ms / whole:.1%}")

        delegates = [part for part in found["parts"] if _delegate(part["name"])]
        kernels = found["parts"][len(delegates) :]
        for part in (*delegates, *kernels[:SHOWN]):
            add(part["name"], part["calls"], part["ms"])
        if rest := kernels[SHOWN:]:
            add(f"{len(rest)} other operators", sum(one["calls"] for one in rest), sum(one["ms"] for one in rest))
        add(OUTSIDE, 0, found["outside_ms"])
        calls = sum(one["calls"] for one in kernels)
        table.add_section()
        add("all delegates", len(delegates), found["delegates_ms"])
        add("all portable operators", calls, found["kernels_ms"])
        console.print(table)
