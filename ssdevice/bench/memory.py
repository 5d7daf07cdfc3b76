"""Memory of one decoding mode, in a process of its own: modes in one process would share it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import ssdevice
from ssdevice.errors import SSDeviceError, typed_line
from ssdevice.memory import own_peak_mb
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.session import Session

START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from ssdevice.bench.memory import main; main()"
)


def measure_memory(
    bundle: Path,
    app: str | None,
    options: EngineOptions,
    mode: str,
    prompt: Sequence[int],
    max_tokens: int,
) -> dict[str, float]:
    """The memory of a fresh process that opens a bundle and answers a prompt twice.

    In MB (10⁶ bytes): ``resident_mb`` after the answers, ``peak_rss_mb`` at its most, mostly while
    it opens. Raises SSDeviceError.
    """
    asked = [str(bundle), app, mode, asdict(options), list(prompt), max_tokens]
    command = [sys.executable, "-P", "-c", START, str(Path(ssdevice.__file__).resolve().parents[1])]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise SSDeviceError(f"the process that measures memory: {said[-1]}")
    resident, peak = json.loads(done.stdout.splitlines()[-1])
    peak = max(resident, peak)  # Linux counts in batches: the peak may lag behind
    return {"resident_mb": round(resident, 1), "peak_rss_mb": round(peak, 1)}


def main() -> None:
    """The process: it reads what to do from standard input and writes its memory in MB."""
    import psutil

    bundle, app, mode, options, prompt, max_tokens = json.load(sys.stdin)
    try:
        with Session.open(bundle, app=app, options=EngineOptions(**options)) as session:
            # The first answer opens graphs, which gives back the pages that others have mapped.
            for _ in range(2):
                session.reset()
                for _ in session.runs(prompt, max_tokens=max_tokens, mode=mode):
                    pass
            print("\n" + json.dumps([psutil.Process().memory_info().rss / 1e6, own_peak_mb()]))
    except SSDeviceError as error:
        sys.exit(typed_line(error))
