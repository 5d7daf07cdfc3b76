"""What is expensive to make (exports, conversions) is made once in a test run and shared by all of
its processes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from filelock import FileLock

VARIABLE = "SSDEVICE_TESTS_FOLDER"
"""Names the folder of the run; tests/conftest.py makes it, and removes it after the last process
has ended.
"""
_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def folder() -> Path:
    """The folder of the run; without pytest (``python -m tests.fuzz``) one of this process."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    _kept.append(tempfile.TemporaryDirectory(prefix="ssdevice-tests-"))
    return Path(_kept[-1].name)


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The path ``name`` below the folder of the run, which ``make(path)`` writes if no process has
    done so yet.
    """
    place = folder() / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.exists():
            unfinished = place.parent / "unfinished" / place.name
            shutil.rmtree(unfinished, ignore_errors=True)  # another process failed here
            unfinished.parent.mkdir(exist_ok=True)
            make(unfinished)
            unfinished.rename(place)
    return place
