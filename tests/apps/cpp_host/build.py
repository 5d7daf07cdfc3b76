"""The C++ host, compiled once a test run with AddressSanitizer and UBSan, which end it with another
exit code.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import onnxruntime

from tests.compiled_kernels import COMPILER, NO_COMPILER, built
from tests.once import made_once

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "apps" / "cpp_host"
SCHEMA = ROOT / "ssdevice" / "bundle" / "manifest.schema.json"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@cache
def missing() -> str:
    """What is missing for a build; empty: nothing."""
    if COMPILER is None:
        return NO_COMPILER
    given = "#include <nlohmann/json.hpp>"
    found = subprocess.run(
        [COMPILER, "-E", "-x", "c++", "-"], input=given, capture_output=True, text=True
    )
    return (
        "needs nlohmann/json (Debian: apt-get install nlohmann-json3-dev)"
        if found.returncode
        else ""
    )


def package() -> Path:
    """A folder like that of a release of ONNX Runtime: our stand-in for its header, and the library
    of the wheel.
    """

    def make(out: Path) -> None:
        (out / "include").mkdir(parents=True)
        (out / "lib").mkdir()
        header = "onnxruntime_c_api.h"
        (out / "include" / header).symlink_to(Path(__file__).with_name(header))
        library = next(Path(onnxruntime.__file__).with_name("capi").glob("libonnxruntime.*"))
        for name in {
            library.name,
            "libonnxruntime.so",
            "libonnxruntime.so.1",
            "libonnxruntime.dylib",
        }:
            (out / "lib" / name).symlink_to(library)

    return made_once("cpp_host/package", make)


def host() -> Path:
    """The compiled host."""

    def make(file: Path) -> None:
        include = package() / "include"
        lib = package() / "lib"
        generated = file.with_name("generated")
        generated.mkdir(exist_ok=True)
        (generated / "manifest.schema.inc").write_text(
            f'R"schema({SCHEMA.read_text("utf-8")})schema"'
        )
        linked = [
            "-DSSDEVICE_KERNELS",
            built("native"),
            f"-L{lib}",
            f"-Wl,-rpath,{lib}",
            "-lonnxruntime",
        ]
        _compile(file, SOURCES / "host.cpp", "-O0", f"-I{include}", f"-I{generated}", *linked)

    return made_once("cpp_host/host", make)


def vectors() -> Path:
    """The program for test vectors."""
    source = Path(__file__).with_name("vectors.cpp")
    include = package() / "include"
    return made_once("cpp_host/vectors", lambda file: _compile(file, source, "-O0", f"-I{include}"))


def _compile(file: Path, source: Path, *options: str) -> None:
    flags = [
        "-std=c++17",
        "-g1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-ffp-contract=off",
        *SANITIZED,
        f"-I{SOURCES}",
    ]
    subprocess.run([str(COMPILER), *flags, "-o", file, source, *options], check=True)
