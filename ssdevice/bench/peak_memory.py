"""Peak resident memory of one decoding mode, in a separate process: modes in one process would share a peak."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ssdevice.errors import SSDeviceError


def peak_rss_mb(
    bundle: Path, app: str | None, mode: str, threads: int, prompt: Sequence[int], max_tokens: int
) -> float:
    """Peak MB (10⁶ bytes) of a fresh process that opens a bundle and answers one prompt."""
    request = {
        "bundle": str(bundle.resolve()),
        "app": app,
        "arm": mode,
        "threads": threads,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
    }
    done = subprocess.run(
        [sys.executable, "-m", "ssdevice.bench.peak_memory"], input=json.dumps(request), capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise SSDeviceError(f"the process that measures memory failed: {reason}")
    return float(done.stdout)


def own_peak_mb() -> float:
    """Peak MB (10⁶ bytes) of this process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6  # bytes on macOS, KiB elsewhere


def main() -> None:
    """Answer the request on standard input and print the peak."""
    from ssdevice.runtime.session import Session

    request = json.load(sys.stdin)
    with Session.open(request["bundle"], app=request["app"], threads=request["threads"]) as session:
        for _ in session.runs(request["prompt"], max_tokens=request["max_tokens"], mode=request["arm"]):
            pass
    print(own_peak_mb())


if __name__ == "__main__":
    main()
