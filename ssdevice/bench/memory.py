"""Memory of one decoding mode, measured in a process of its own: modes in one process would share it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssdevice.errors import SSDeviceError

if TYPE_CHECKING:
    from ssdevice.runtime.engine import EngineOptions

STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class ProcessMemory:
    """MB (10⁶ bytes) of a process: ``resident_mb`` after answers, ``peak_mb`` at its most, mostly while it opens."""

    resident_mb: float
    peak_mb: float


def measure_memory(
    bundle: Path, app: str | None, mode: str, options: EngineOptions, prompt: Sequence[int], max_tokens: int
) -> ProcessMemory:
    """The memory of a fresh process that opens a bundle and answers a prompt twice. Raises SSDeviceError."""
    request = {
        "bundle": str(bundle.resolve()),
        "app": app,
        "arm": mode,
        "options": asdict(options),
        "prompt": list(prompt),
        "max_tokens": max_tokens,
    }
    done = subprocess.run(
        [sys.executable, "-m", "ssdevice.bench.memory"], input=json.dumps(request), capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise SSDeviceError(f"the process that measures memory failed: {reason}")
    return ProcessMemory(**json.loads(done.stdout))


def own_peak_mb() -> float:
    """Peak MB (10⁶ bytes) of this process."""
    try:  # on Linux, what getrusage says includes the process that started this one
        found = re.search(r"^VmHWM:\s*(\d+) kB", STATUS.read_text("ascii"), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024 / 1e6
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6  # bytes on macOS, KiB elsewhere


def main() -> None:
    """Answer the request on standard input and print the memory."""
    from ssdevice.runtime.engine import EngineOptions
    from ssdevice.runtime.session import Session

    request = json.load(sys.stdin)
    with Session.open(request["bundle"], app=request["app"], options=EngineOptions(**request["options"])) as session:
        for _ in range(2):  # the first answer opens graphs, which gives back the pages that others have mapped
            for _ in session.runs(request["prompt"], max_tokens=request["max_tokens"], mode=request["arm"]):
                pass
        import psutil  # here, so that its own memory does not count in the peak

        resident = psutil.Process().memory_info().rss / 1e6
    peak = max(resident, own_peak_mb())  # Linux counts pages in batches, so the peak it tells may lag behind
    print(json.dumps(asdict(ProcessMemory(resident, peak))))


if __name__ == "__main__":
    main()
