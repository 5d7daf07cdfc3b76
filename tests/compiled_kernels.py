"""The kernels for ONNX Runtime, compiled once a test run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ssdevice.runtime.onnx import kernels
from tests.once import made_once

COMPILER = next((name for name in kernels.COMPILERS if shutil.which(name)), None)
NO_COMPILER = "needs a C++ compiler (Debian: apt-get install g++)"
KINDS = {"native": [], "without-vnni": ["-DSSDEVICE_WITHOUT_VNNI"], "portable": ["-DSSDEVICE_PORTABLE"]}
"""The kernels as users get them, as older CPUs run them, and with nothing but standard C++."""


def built(kind: str) -> Path:
    """The compiled kernels of a kind."""

    def make(file: Path) -> None:
        sources = [str(path) for path in kernels.SOURCES.glob("*.cpp")]
        flags = [*kernels.FLAGS, "-Wall", "-Wextra", "-Werror", *KINDS[kind]]
        subprocess.run([str(COMPILER), *flags, "-o", str(file), *sources], check=True)

    return made_once(f"kernels/{kind}.so", make)
