"""``ssdevice bench --profile``: where the time of a call goes, inside the target and around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ssdevice.bench.runner import BenchOptions, measure
from ssdevice.contract import STEP
from ssdevice.data import Example
from ssdevice.runtime.engine import Kernel
from ssdevice.runtime.session import Session

SHOWN = 12
OTHER = "other"


def show_profile(session: Session, examples: Sequence[Example], max_tokens: int) -> None:
    """Decode a few prompts in every mode and print the time by operator, and the host's share of a step.

    Profiling slows calls down, so trust the shares rather than the times.
    """
    console = Console(soft_wrap=True, highlight=False)
    modes = Table("decoding mode", "steps", "inside, ms/step", "host, µs/step", title="Steps")
    result = measure(session, examples, BenchOptions(rounds=1, max_tokens=max_tokens), lambda *_: None)
    for name, mode in result.modes.items():
        inside, host = mode.native_ms_per_step.median, mode.host_us_per_step.median
        modes.add_row(name, str(sum(answer.steps for answer in mode.answers)), f"{inside:.3f}", f"{host:.0f}")
    console.print(modes)
    parts = _parts(session) if STEP in session.engine.functions else {}
    for function, kernels in session.engine.profile().items():
        _show(console, f"{function}: kernels", "operator", kernels, lambda kernel: kernel.operator)
        if function == STEP and parts:
            title = f"{function}: parts"
            _show(console, title, "part of the step", kernels, lambda kernel: parts.get(kernel.node, OTHER))


def _show(console: Console, title: str, column: str, kernels: Sequence[Kernel], key: Callable[[Kernel], str]) -> None:
    """Print the time of kernels grouped by ``key``, largest first."""
    times: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        times[key(kernel)] += kernel.microseconds
    total = sum(times.values()) or 1.0
    table = Table(column, "share", "µs/call", title=title)
    ordered = sorted(times.items(), key=lambda item: -item[1])
    for name, microseconds in ordered[:SHOWN]:
        table.add_row(name, f"{microseconds / total:.1%}", f"{microseconds:.0f}")
    if rest := sum(microseconds for _, microseconds in ordered[SHOWN:]):
        table.add_row(f"{len(ordered) - SHOWN} others", f"{rest / total:.1%}", f"{rest:.0f}")
    table.add_row("all", "", f"{total:.0f}")
    console.print(table)


def _parts(session: Session) -> Mapping[str, str]:
    """Node of the step -> the part of the method it belongs to, if the target can tell."""
    from ssdevice.export.target import export_target

    return export_target(session.bundle.manifest.target).parts(session.engine) if session.bundle is not None else {}
