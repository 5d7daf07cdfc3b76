"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
from pathlib import Path
from ssdevice.memory import keep_no_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

keep_no_large_blocks()
# After this the C library would take blocks of up to 24 MB from its heap.
del bytearray(24 << 20)[:]
before = resident()
large = []
small = []
for _ in range(20):
    large.append(bytearray(b"x") * (4 << 20))
    small.append(bytearray(b"x") * (100 << 10))
large.clear()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_are_given_back_although_small_ones_behind_them_are_in_use() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 8 << 20
