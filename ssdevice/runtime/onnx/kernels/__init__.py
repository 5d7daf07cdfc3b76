"""Kernels of our own for ONNX Runtime: compiled in the wheels of a platform, elsewhere by
``ssdevice kernels``.

Graphs call their operators by name in ``DOMAIN`` and hold, for each, an ONNX function of standard
operators that computes the same up to rounding (``ssdevice.export.onnx.functions``). ONNX Runtime
takes the kernel where it is registered and the function where not, so every bundle runs without the
kernels.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock

from ssdevice.errors import InputError, first_line
from ssdevice.runtime.notice import say_once

DOMAIN = "ssdevice"
INT4_LINEAR = "Int4Linear"
"""``(x [.., R, K], codes [N, K / 32, 16], scales [N, K / 32]) -> [.., R, N]``; int4.cpp says what
it computes.
"""
INT8_LINEAR = "Int8Linear"
"""``(x [.., R, K], codes [K, N], scales [N], zero) -> [.., R, N]``; int8.cpp says what it
computes.
"""
INT8_FACTOR = "Int8Factor"
"""``Int8Linear`` of weights that are inputs of the graph: a part of LOW_RANK, for which alone there
is no kernel.
"""
LOW_RANK = ("LowRank1", "LowRank2", "LowRank3")
"""A product of the base and what an app's LoRA adds to it, by the number of linears side by side
(low_rank.cpp).
"""
HALF_LINEAR = "HalfLinear"
"""``(x [.., R, K], weight [K, N] float16) -> [.., R, N]`` (half_linear.cpp)."""
INT8_ARGMAX = "Int8Argmax"
"""``(x [.., R, K], codes [K, N], scales [N], zero) -> [.., R, 1]`` int64: where ``Int8Linear`` is
largest.
"""
INT8_EMBEDDING = "Int8Embedding"
"""``(ids [..], codes [K, N], scales [N]) -> [.., K]`` (int8.cpp)."""
TIED_EMBEDDING = "TiedEmbedding"
"""``Int8Embedding`` with codes that an ``Int8Argmax`` reads as well (argmax.cpp)."""
ADD_NORM = "AddNorm"
"""``(x, y [.., F], weight [F]) -> normed, sum [.., F]``, residual addition and RMS normalization
(rows.cpp).
"""
GATED_SILU = "GatedSilu"
"""``x [.., 2 F] -> [.., F]``, the gated activation of an MLP (rows.cpp)."""
ROTARY_SPLIT = "RotarySplit"
"""Queries, keys and values out of a merged product, with rotary positions (rows.cpp)."""
TREE_ATTENTION = "TreeAttention"
"""Grouped-query attention of new rows over the cache and themselves; attention.cpp says how."""
HALF_TREE_ATTENTION = "HalfTreeAttention"
"""The same over a cache in float16."""
CAPPED_ATTENTION = "CappedAttention"
"""TREE_ATTENTION with a soft cap of its scores, for which there is no kernel."""

REGION = "Region"
"""Several operators in one node; region.cpp says how its attribute ``text`` lists them."""
IN_REGIONS = (
    ADD_NORM,
    GATED_SILU,
    HALF_LINEAR,
    HALF_TREE_ATTENTION,
    INT4_LINEAR,
    INT8_EMBEDDING,
    INT8_LINEAR,
    *LOW_RANK,
    ROTARY_SPLIT,
    TIED_EMBEDDING,
    TREE_ATTENTION,
)
"""Operators that a region takes."""
ATTENTION = "ssdevice.attention"
"""Metadata of a graph that has no other attention than TREE_ATTENTION."""

FOLDER = "SSDEVICE_KERNELS"
"""Environment variable: the folder of compiled kernels (default: ``ssdevice`` in the user's
cache).
"""
SOURCES = Path(__file__).parent
SAMPLING = SOURCES.parents[1] / "sampling" / "native"
"""The choice of tokens for hosts, which the library has as well."""
PREFIX = "kernels-"
SUFFIX = ".so"
SYMBOLS = (
    "RegisterCustomOps",
    "ssdevice_apart",
    "ssdevice_choose",
    "ssdevice_crew",
    "ssdevice_log_total",
)
"""What is called in the library."""
OTHERS = 0o022
"""Mode of what others can change."""
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
)
"""No contraction: a fused multiply-add would round once where another CPU rounds twice."""


_opening = Lock()


def _unlock_after_fork() -> None:
    """Another thread may hold the lock when a process is forked, and does not exist in that one."""
    global _opening
    _opening = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_after_fork)


def library() -> Path | None:
    """The compiled kernels of this version, if they were built for this machine: in the package, or
    afterwards.
    """
    folders = [] if os.environ.get(FOLDER) else [SOURCES]
    with suppress(InputError):  # a user without a home has built none
        folders.append(_folder())
    for folder in folders:
        for file in folder.glob(f"{_name()}*{SUFFIX}"):
            return file
    if any(any(folder.glob(f"{PREFIX}*")) for folder in folders):
        say_once(
            "ssdevice: the kernels on this machine are of another version; `ssdevice kernels` "
            "builds them again"
        )
    return None


def build() -> Path:
    """Compile the kernels and put them where ``library`` finds them. Raises InputError."""
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made a folder ({error.strerror}); set {FOLDER} to a folder of "
            "your own and build the kernels there, or decode without them (--no-kernels)"
        ) from error
    status = folder.stat()
    if not os.environ.get(FOLDER) and status.st_uid == os.getuid():
        # It may be older, and made with a umask of 002.
        folder.chmod(status.st_mode & ~OTHERS)
    _check_owner(folder)
    file = compiled(folder)
    for old in set(folder.glob(f"{PREFIX}*")) - {file}:
        old.unlink(missing_ok=True)
    return file


def compiled(folder: Path) -> Path:
    """The library, compiled into a folder. Raises InputError if it cannot be compiled."""
    compiler = os.environ.get("CXX")
    if compiler and shutil.which(compiler) is None:
        raise InputError(
            f"the kernels need a C++ compiler, and CXX is {compiler}, which is not there; install "
            "one (Debian: apt-get install g++)"
        )
    compiler = compiler or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise InputError(
            f"the kernels need a C++ compiler, and there is no {', '.join(COMPILERS)}; install one "
            "(Debian: apt-get install g++)"
        )
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        made = Path(unfinished) / f"made{SUFFIX}"
        done = subprocess.run(
            [compiler, *FLAGS, "-o", str(made), *map(str, sources())],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
            raise InputError(f"{compiler} cannot compile the kernels ({said})")
        return put(made, folder)


def sources(*patterns: str) -> list[Path]:
    """The files that the library is compiled from; ``patterns``: of others beside them."""
    return sorted(
        file
        for pattern in ("*.cpp", *patterns)
        for at in (SOURCES, SAMPLING)
        for file in at.glob(pattern)
    )


def put(made: Path, folder: Path) -> Path:
    """Move a compiled library to where ``library`` finds it; its name then ends in its sha256."""
    file = folder / f"{_name()}{_sha256(made)}{SUFFIX}"
    made.chmod(0o755)
    os.replace(made, file)  # whole or not at all, also for a process that looks now
    return file


@contextmanager
def crew(file: Path, threads: int, apart: bool = False) -> Iterator[None]:
    """Sessions opened meanwhile run these kernels on ``threads`` threads of the process; 0: on
    threads of their own.

    ``apart``: the operators of regions as nodes, which a profile shows. Raises InputError for a
    file that is broken or no library of ours, and for one that another user can have changed.
    """
    library = loaded(file)
    with _opening:
        library.ssdevice_crew(threads)
        library.ssdevice_apart(apart)
        try:
            yield
        finally:
            library.ssdevice_crew(0)
            library.ssdevice_apart(False)


def loaded(file: Path) -> ctypes.CDLL:
    """The library in this process. Raises the errors of ``crew``."""
    _check(file)
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise InputError(
            f"{file} cannot be loaded ({first_line(error)}); build it again with `ssdevice "
            "kernels`, or pass --no-kernels"
        ) from error
    for symbol in SYMBOLS:
        if not hasattr(library, symbol):
            raise InputError(
                f"{file} is no library of these kernels: it has no {symbol}; build it again with "
                "`ssdevice kernels`, or pass --no-kernels"
            )
    return library


def cores() -> int:
    """The processor's cores that this process may use, without the second threads of each."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    of = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    found = set()
    for cpu in os.sched_getaffinity(0):
        file = Path(of.format(cpu))
        found.add(file.read_text("ascii") if file.is_file() else str(cpu))
    return len(found)


def _check(file: Path) -> None:
    """Raise InputError unless a library is what was compiled here: half of one would end the
    process.
    """
    try:
        real = file.resolve(strict=True)
        if real.parent != SOURCES.resolve():  # where it would be as safe as this file
            _check_owner(real)
            _check_owner(real.parent)
        same = file.name.endswith(f"-{_sha256(file)}{SUFFIX}")
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}); build it again with `ssdevice kernels`, or "
            "pass --no-kernels"
        ) from error
    if not same:
        raise InputError(
            f"{file} is not what was compiled: its sha256 is another than in its name; build it "
            "again with `ssdevice kernels`, or pass --no-kernels"
        )


def _check_owner(path: Path) -> None:
    """Raise InputError if users other than this one and root can change a file or what is in a
    folder.
    """
    status = path.stat()
    if status.st_uid not in (0, os.getuid()):
        raise InputError(
            f"{path} belongs to another user (id {status.st_uid}), whose kernels are not loaded; "
            f"set {FOLDER} to a folder of your own and build the kernels there, or decode without "
            "them (--no-kernels)"
        )
    if status.st_mode & OTHERS:
        raise InputError(
            f"{path} can be changed by other users (mode {status.st_mode & 0o777:o}); chmod go-w "
            f"{path}, or set {FOLDER} to a folder of your own and build the kernels there, or "
            "decode without them (--no-kernels)"
        )


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def _name() -> str:
    """How the name of the library for this machine begins, made of these sources; every engine asks
    for it.
    """
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sources("*.h"):
        digest.update(path.read_bytes())
    return f"{PREFIX}{digest.hexdigest()[:16]}-{platform.system()}-{platform.machine()}-"


def _folder() -> Path:
    """The library's folder. Raises InputError for a user without a home and without ``FOLDER``."""
    folder = os.environ.get(FOLDER)
    if folder:
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssdevice"
    except RuntimeError as error:
        raise InputError(
            f"this user has no home directory for the kernels; set {FOLDER} to a folder"
        ) from error
