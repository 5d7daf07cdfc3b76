"""What an export will take, predicted from the model's shapes before any weights are loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssdevice.bundle.manifest import Precision
from ssdevice.errors import SSDeviceError
from ssdevice.progress import duration

if TYPE_CHECKING:
    from ssdevice.export.plan import ExportPlan

MEASURED_ON = "two cores of an x86 CPU"
MEASURED_CONTEXT = 1024
COMPARED = 0.05
"""Seconds of a million parameters beside transformers; with weights mapped this takes no more memory than the rest."""
CACHES = 3
"""Memory of a token beyond that context, in caches of float32: those of the gate's sides, and its masks."""


@dataclass(frozen=True)
class Cost:
    """What exports to a target take: measured, and fitted by a line each.

    seconds = ``start`` + ``graph_layer`` for each layer of each graph + ``weight`` for each million parameters, and
    COMPARED for each comparison with transformers;
    peak bytes = ``memory`` MB + ``weight_bytes`` for each parameter, ``float_bytes`` in float32, and
    ``CACHES`` for tokens beyond MEASURED_CONTEXT.
    """

    start: float
    graph_layer: float
    weight: float
    memory: float
    weight_bytes: float
    float_bytes: float

    def predict(self, plan: ExportPlan) -> Prediction:
        """What this export will roughly take."""
        parameters = sum(plan.parameters.values())
        graphs = len(plan.function_names) * (1 if plan.merged else len(plan.apps))
        seconds = self.start + self.graph_layer * plan.geometry.layers * graphs + self.weight * parameters / 1e6
        if plan.options.cross_check:
            seconds += COMPARED * parameters / 1e6 * max(1, sum(app.has_lora for app in plan.apps))
        beyond = max(0, plan.geometry.context - MEASURED_CONTEXT) * CACHES * plan.geometry.token_bytes("float32")
        each = self.float_bytes if plan.options.quant is Precision.FP32 else self.weight_bytes
        peak = int(self.memory * 1e6 + each * parameters + beyond)
        return Prediction(seconds, peak, plan.estimated_bytes())


@dataclass(frozen=True)
class Prediction:
    """``seconds`` on a machine such as the constants were measured on; ``peak_bytes`` of memory; ``bundle_bytes``."""

    seconds: float
    peak_bytes: int
    bundle_bytes: int

    def __str__(self) -> str:
        return (
            f"about {duration(self.seconds)} on {MEASURED_ON}, {self.peak_bytes / 1e9:.1f} GB of memory, "
            f"and {self.bundle_bytes / 1e6:.0f} MB on disk"
        )

    def check_memory(self, available: int | None) -> None:
        """Raise SSDeviceError if the export needs more than there is; None: not known."""
        if available is not None and self.peak_bytes > available:
            raise SSDeviceError(
                f"this export needs about {self.peak_bytes / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are "
                "available: close other programs, use a larger machine, or try with --ignore-memory"
            )


def available_memory() -> int | None:
    """Bytes that this process may still take, None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    limits = [_meminfo(), _cgroup()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min((limit for limit in limits if limit is not None), default=None)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None  # not Linux
    found = dict(line.split(":", 1) for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None


def _cgroup() -> int | None:
    """Of the container, if one sets a limit."""
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text("ascii").strip()
    except OSError:
        return None
    return int(most) if most.isdigit() else None
