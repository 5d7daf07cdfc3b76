"""Mapped pages are given back unless they were changed."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest

from ssdevice.runtime.onnx.sessions import SMAPS, give_back

PAGES = 64


def resident(file: Path) -> int:
    """Bytes of a file's mappings that are in memory."""
    rows = re.findall(
        rf"{re.escape(str(file))}\n(?:[A-Z].*\n)*?Rss: +(\d+) kB", SMAPS.read_text("utf-8")
    )
    return sum(map(int, rows)) * 1024


@pytest.mark.skipif(not SMAPS.exists(), reason="the size of the process is read from /proc")
def test_pages_are_given_back_and_read_again_but_changed_ones_stay(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    changed = tmp_path / "changed.bin"
    other = tmp_path.parent / "other.bin"
    content = bytes(range(256)) * (mmap.PAGESIZE * PAGES // 256)
    for path in (file, changed, other):
        path.write_bytes(content)
    maps = {}
    for path in (file, changed, other):
        with path.open("rb") as opened:
            maps[path] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        assert bytes(maps[path]) == content
    maps[changed][:2] = b"ab"
    give_back(tmp_path)
    assert resident(file) == 0
    assert resident(changed) == resident(other) == len(content)
    assert bytes(maps[file]) == content and maps[changed][:2] == b"ab"
    for opened in maps.values():
        opened.close()
