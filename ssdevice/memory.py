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
    """From now on, give back every large block as soon as it is freed; glibc only, which otherwise keeps those of up to
    32 MB, held in memory by blocks in use between them."""
    if (set_option := _of_glibc("mallopt")) is not None:
        set_option(MMAP_THRESHOLD, LARGE)


def trim_heaps() -> None:
    """Give back what was freed in the heaps of the C library, which every thread has one of; glibc only."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


def _of_glibc(name: str) -> Any:
    """A function of the C library; None where it is another one."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


def own_peak_mb() -> float:
    """Peak MB (10⁶ bytes) of this process."""
    with suppress(OSError):  # on Linux, what getrusage says includes the process that started this one
        found = re.search(r"^VmHWM:\s*(\d+) kB", STATUS.read_text("ascii"), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6  # bytes on macOS, KiB elsewhere
