"""Freed memory, given back to the system."""

from __future__ import annotations

import ctypes
import gc


def free_memory() -> None:
    """Give back what nothing uses: garbage, and what the C library keeps for later (glibc only)."""
    gc.collect()
    trim_heaps()


def trim_heaps() -> None:
    """Give back what was freed in the heaps of the C library, which every thread has one of; glibc only."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return
    trim(ctypes.c_size_t(0))
