"""The memory of this process: its peak, and freed memory that is given back to the system."""

import ctypes
import gc
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
LARGE = 1 << 20
"""A block of at least so many bytes gets pages of its own, which are returned at once."""
MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""


def free_memory() -> None:
    """Give back what nothing uses: garbage, and what the C library keeps for later (glibc only)."""
    gc.collect()
    trim_heaps()


def keep_no_large_blocks() -> None:
    """Give back every large block as soon as it is freed.

    glibc otherwise keeps those of up to 32 MB that lie between others.
    """
    _call_glibc("mallopt", MMAP_THRESHOLD, LARGE)


def trim_heaps() -> None:
    """Give back what was freed in the C library's heaps, one of each thread (glibc only)."""
    _call_glibc("malloc_trim", ctypes.c_size_t(0))


def _call_glibc(name: str, *values: Any) -> None:
    with suppress(AttributeError, OSError, TypeError):  # another C library
        getattr(ctypes.CDLL(None), name)(*values)


def own_peak_mb() -> float:
    """Peak MB (10⁶ bytes) of this process."""
    # On Linux, getrusage includes the process that started this one.
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", STATUS.read_text("ascii"), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return peak * unit / 1e6
