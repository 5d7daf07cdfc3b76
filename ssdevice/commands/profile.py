"""``ssdevice bench --profile``: where the time of a call goes, inside the target and around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ssdevice.bench.runner import BenchOptions, measure
from ssdevice.contract import STEP
from ssdevice.data import Example
from ssdevice.runtime.engine import Kernel
from ssdevice.runtime.session import Session

OTHER = "other"


def profile(session: Session, examples: Sequence[Example], max_tokens: int) -> dict[str, Any]:
    """Decode a few prompts in every mode: the host's share of a step, and the time by operator.

    Profiling slows calls down, so trust the shares rather than the times.
    """
    result = measure(session, examples, BenchOptions(rounds=1, max_tokens=max_tokens), lambda *_: None)
    found: dict[str, Any] = {
        "modes": [
            {
                "mode": name,
                "steps": sum(answer.steps for answer in mode.answers),
                "inside_ms_per_step": mode.native_ms_per_step.median,
                "host_us_per_step": mode.host_us_per_step.median,
            }
            for name, mode in result.modes.items()
        ]
    }
    parts = _parts(session) if STEP in session.engine.functions else {}
    for function, kernels in session.engine.profile().items():
        found[f"{function}: kernels"] = _shares(kernels, lambda kernel: kernel.operator)
        if function == STEP and parts:
            found[f"{function}: parts"] = _shares(kernels, lambda kernel: parts.get(kernel.node, OTHER))
    return found


def _shares(kernels: Sequence[Kernel], key: Callable[[Kernel], str]) -> list[dict[str, Any]]:
    """The time of kernels grouped by ``key``, largest first."""
    times: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        times[key(kernel)] += kernel.microseconds
    total = sum(times.values()) or 1.0
    rows = [*sorted(times.items(), key=lambda row: -row[1]), ("all", total)]
    return [{"name": name, "share": f"{us / total:.1%}", "us_per_call": round(us)} for name, us in rows]


def _parts(session: Session) -> Mapping[str, str]:
    """Node of the step -> the part of the method it belongs to, if the target can tell."""
    from ssdevice.export.target import export_target

    return export_target(session.bundle.manifest.target).parts(session.engine) if session.bundle is not None else {}
