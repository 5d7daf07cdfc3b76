"""Memory of one decoding mode, measured in a process of its own: modes in one process would share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ssdevice.bench.peers import ours
from ssdevice.bench.peers.arm import Arm, Json
from ssdevice.bench.peers.remote import Worker
from ssdevice.runtime.engine import EngineOptions


@dataclass(frozen=True)
class ProcessMemory:
    """MB (10⁶ bytes) of a process: ``resident_mb`` after answers, ``peak_mb`` at its most, mostly while it opens."""

    resident_mb: float
    peak_mb: float


def measure_memory(
    bundle: Path, app: str | None, mode: str, options: EngineOptions, prompt: Sequence[int], max_tokens: int
) -> ProcessMemory:
    """The memory of a fresh process that opens a bundle and answers a prompt twice. Raises SSDeviceError."""
    settings: Json = {
        "bundle": str(bundle.resolve()),
        "app": app,
        "mode": mode,
        "options": asdict(options),
        "sampling": {},
        "stops": [],
    }
    with Worker(Arm("the process that measures memory", ours.__name__, settings, disk_bytes=0)) as worker:
        for _ in range(2):  # the first answer opens graphs, which gives back the pages that others have mapped
            worker.answer(prompt, max_tokens)
        resident = worker.resident_mb()
    return ProcessMemory(resident, max(resident, worker.peak_mb))  # Linux counts in batches: the peak may lag behind
