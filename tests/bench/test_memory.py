"""The memory of a process is its own, not that of the process that started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ssdevice.bench.memory import measure_memory
from ssdevice.errors import SSDeviceError
from ssdevice.memory import own_peak_mb
from ssdevice.runtime.engine import EngineOptions


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the system does not tell the two apart"
)
def test_the_peak_does_not_include_the_parent() -> None:
    large = b"1" * 400_000_000
    asked = [sys.executable, "-c", "from ssdevice.memory import own_peak_mb; print(own_peak_mb())"]
    child = float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    assert child < len(large) / 1e6 < own_peak_mb()


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(SSDeviceError, match="measures memory: BundleError: .*no such bundle"):
        measure_memory(tmp_path / "none", None, EngineOptions(), "plain", [1], 1)
