"""The kernels for ONNX Runtime, compiled once a test run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from ssdevice.runtime.onnx import kernels
from tests.once import folder, made_once

COMPILER = next((name for name in kernels.COMPILERS if shutil.which(name)), None)
NO_COMPILER = "needs a C++ compiler (Debian: apt-get install g++)"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
KINDS = {
    "native": [],
    "without-vnni": ["-DSSDEVICE_WITHOUT_VNNI"],
    "portable": ["-DSSDEVICE_PORTABLE"],
}
"""The kernels as users get them, as older CPUs run them, and with nothing but standard C++."""


QUICK = {"-O3": "-O1"}
"""Flags in place of those that users get, where only results count: the instructions that sources
name stay.
"""
HEADER = kernels.SOURCES / "kernel.h"
"""What takes a compiler longest to read, 1 to 2 s, and most sources include."""


def built(kind: str) -> Path:
    """The compiled kernels of a kind."""

    return _compiled(kind, [*WARNINGS, *KINDS[kind]])


def native_objects() -> dict[str, str]:
    """Source of the kernels as users get them -> its object, for a compiler that only links."""
    sources = kernels.sources()
    objects = compiled_objects(sources, [str(COMPILER)], [*kernels.FLAGS, *WARNINGS])
    return dict(zip(map(str, sources), objects, strict=True))


def sanitized() -> Path:
    """The kernels with AddressSanitizer and UBSan: a process that loads them must be started with
    ``preloaded``.
    """
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    return _compiled("sanitized", ["-O0", "-g1", *checks])


@cache
def preloaded() -> str | None:
    """What LD_PRELOAD has to be; None: there is no GCC with AddressSanitizer here."""
    if COMPILER is None or sys.platform != "linux":
        return None
    # Without the C++ library beside it AddressSanitizer finds nobody who throws: Python is none of
    # its users.
    asked = [[COMPILER, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    files = [subprocess.run(ask, capture_output=True, text=True).stdout.strip() for ask in asked]
    return " ".join(files) if all(Path(file).is_absolute() for file in files) else None


@cache
def _preprocessed(source: Path, given: tuple[str, ...]) -> bytes:
    return subprocess.run([*given, str(source), "-E", "-P"], check=True, capture_output=True).stdout


def _reading_less(source: Path, given: Sequence[str]) -> list[str]:
    """Flags with which a compiler has read HEADER before; none for a source that does not include
    it by itself.

    In what it has read before, GCC forgets which warnings its own header turns off for AVX-512.
    """
    if "_mm512" in source.read_text() or not _includes_header(source):
        return []

    def make(out: Path) -> None:
        out.mkdir()
        (out / "all.h").write_text(f'#include "{HEADER}"\n')
        subprocess.run(
            [*given, "-x", "c++-header", "-o", out / "all.h.gch", out / "all.h"], check=True
        )

    key = hashlib.sha256(repr(given).encode()).hexdigest()
    return ["-include", str(made_once(f"kernels/headers/{key}", make) / "all.h")]


def _includes_header(file: Path) -> bool:
    names = re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE)
    inside = [kernels.SOURCES / name for name in names]
    return HEADER in inside or any(_includes_header(each) for each in inside if each.exists())


def compiled_objects(
    sources: Iterable[Path], compiler: list[str], flags: Sequence[str]
) -> list[str]:
    """The sources compiled, each once a run for all flags with which the preprocessor makes the
    same text of it.

    A text that nobody gets as a user, since a flag defines something, is optimized less: it has to
    compute the same.
    """
    flags = [flag for flag in flags if flag not in ("-shared", "-static")]  # for the linker
    defines = [flag for flag in flags if flag.startswith("-D")]
    users = [flag for flag in flags if flag not in defines]
    including = ["-I", str(kernels.SOURCES)]

    def of(source: Path) -> str:
        text = _preprocessed(source, (*compiler, *flags, *including)) if defines else b""
        same = not defines or text == _preprocessed(source, (*compiler, *users, *including))
        optimized = users if same else [QUICK.get(flag, flag) for flag in users]
        key = hashlib.sha256(
            repr((compiler, optimized, source if same else text)).encode()
        ).hexdigest()

        def make(file: Path) -> None:
            given = [
                compiler[0],
                *optimized,
                *defines,
                *including,
                *compiler[1:],
            ]  # its own flags have the last word
            read = _reading_less(source, given)
            subprocess.run([*given, *read, "-c", "-o", str(file), str(source)], check=True)

        return str(made_once(f"kernels/objects/{source.stem}-{key}.o", make))

    # Processes that need the same begin with different sources, so that none waits while there is
    # one to compile.
    sources = [*sources]
    made = {
        source: of(source)
        for source in sorted(sources, key=lambda source: hash((os.getpid(), source.name)))
    }
    return [made[source] for source in sources]


def _compiled(name: str, flags: Sequence[str]) -> Path:
    given = [*kernels.FLAGS, *flags]

    def make(out: Path) -> None:
        out.mkdir(mode=0o755)
        objects = compiled_objects(kernels.sources(), [str(COMPILER)], given)
        subprocess.run([str(COMPILER), *given, "-o", str(out / "made.so"), *objects], check=True)
        kernels.put(out / "made.so", out)

    if not (folder() / "kernels" / name).exists():
        compiled_objects(
            kernels.sources(), [str(COMPILER)], given
        )  # before the lock, so that processes share the work
    return next(made_once(f"kernels/{name}", make).iterdir())
