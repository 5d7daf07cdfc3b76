"""The kernels for ONNX Runtime, compiled once a test run."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from ssdevice.runtime.onnx import kernels
from tests.once import made_once

COMPILER = next((name for name in kernels.COMPILERS if shutil.which(name)), None)
NO_COMPILER = "needs a C++ compiler (Debian: apt-get install g++)"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
KINDS = {"native": [], "without-vnni": ["-DSSDEVICE_WITHOUT_VNNI"], "portable": ["-DSSDEVICE_PORTABLE"]}
"""The kernels as users get them, as older CPUs run them, and with nothing but standard C++."""


def built(kind: str) -> Path:
    """The compiled kernels of a kind."""

    return _compiled(kind, [*WARNINGS, *KINDS[kind]])


def native_objects() -> dict[str, str]:
    """Source of the kernels as users get them -> its object, for a compiler that has only to link."""
    sources = kernels.sources()
    objects = compiled_objects(sources, [str(COMPILER)], [*kernels.FLAGS, *WARNINGS])
    return dict(zip(map(str, sources), objects, strict=True))


def sanitized() -> Path:
    """The kernels with AddressSanitizer and UBSan: a process that loads them must be started with ``preloaded``."""
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    return _compiled("sanitized", ["-O0", "-g1", *checks])


@cache
def preloaded() -> str | None:
    """What LD_PRELOAD has to be; None: there is no GCC with AddressSanitizer here."""
    if COMPILER is None or sys.platform != "linux":
        return None
    # Without the C++ library beside it AddressSanitizer finds nobody who throws: Python is none of its users.
    asked = [[COMPILER, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    files = [subprocess.run(ask, capture_output=True, text=True).stdout.strip() for ask in asked]
    return " ".join(files) if all(Path(file).is_absolute() for file in files) else None


def compiled_objects(sources: Iterable[Path], compiler: list[str], flags: Sequence[str]) -> list[str]:
    """The sources compiled, each once a run for all flags with which the preprocessor makes the same text of it."""
    flags = [flag for flag in flags if flag not in ("-shared", "-static")]  # for the linker
    shared = [flag for flag in flags if not flag.startswith("-D")]

    def of(source: Path) -> str:
        given = [*compiler, *flags, "-I", str(kernels.SOURCES), str(source)]
        text = subprocess.run([*given, "-E", "-P"], check=True, capture_output=True).stdout
        key = hashlib.sha256(repr((compiler, shared, text)).encode()).hexdigest()

        def make(file: Path) -> None:
            subprocess.run([*given, "-c", "-o", str(file)], check=True)

        return str(made_once(f"kernels/objects/{source.stem}-{key}.o", make))

    return [of(source) for source in sources]


def _compiled(name: str, flags: Sequence[str]) -> Path:
    def make(folder: Path) -> None:
        folder.mkdir(mode=0o755)
        given = [*kernels.FLAGS, *flags]
        objects = compiled_objects(kernels.sources(), [str(COMPILER)], given)
        subprocess.run([str(COMPILER), *given, "-o", str(folder / "made.so"), *objects], check=True)
        kernels.put(folder / "made.so", folder)

    return next(made_once(f"kernels/{name}", make).iterdir())
