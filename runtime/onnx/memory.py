"""Pages of weights that nothing reads again, given back to the system.

ONNX Runtime maps a bundle's weights once for every graph, and its kernels read them while a graph is opened, to pack
them for the CPU. Afterwards the mapped pages only count: three graphs have three times the bundle resident.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

from ssdevice.memory import trim_heaps

SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)\n(?:[A-Z].*\n)*?Anonymous: +0 kB$", re.MULTILINE)
"""A mapping of a file of which no page was changed: start, end and path."""
DONTNEED = 4  # MADV_DONTNEED of Linux: what is read again is read from the file


def give_back(folder: Path) -> None:
    """Give back all pages mapped from files in ``folder``, and freed memory. Does nothing on other systems."""
    try:
        libc, mappings = ctypes.CDLL(None), list(_unchanged(folder))
    except (OSError, TypeError):  # no Linux
        return
    for start, size in mappings:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), DONTNEED)
    trim_heaps()


def _unchanged(folder: Path) -> Iterator[tuple[int, int]]:
    """Start and size of every unchanged mapping of a file in a folder."""
    where = folder.resolve()
    for start, end, path in MAPPING.findall(SMAPS.read_text("utf-8", "surrogateescape")):
        if Path(path).parent == where:
            yield int(start, 16), int(end, 16) - int(start, 16)
