"""``python -m tests.swift build/swift`` writes what the Swift tests read.

A bundle that is there is not made again.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.swift import answers, benches, broken, conversations, frames, strings
from tests.vectors.sampling import FILE as SAMPLING
from tests.vectors.sessions import FILE as SESSIONS

REPOSITORY = Path(__file__).resolve().parents[2]


def write(place: Path) -> None:
    """Write all files below ``place``; they are the same every time."""
    place.mkdir(parents=True, exist_ok=True)
    start = f"exec {shlex.quote(sys.executable)} -m tests.swift.interpreter"
    # One thread, as in Python's tests: on a busy machine threads that wait for each other take many
    # times as long.
    script = (
        f'#!/bin/sh\ncd {shlex.quote(str(REPOSITORY))}\nexport OMP_NUM_THREADS=1\n{start} "$@"\n'
    )
    (place / "interpreter").write_text(script, "utf-8")
    (place / "interpreter").chmod(0o755)
    strings.write(place / "tokenizers")
    write_json(place / "conversations.json", conversations.record())
    write_json(place / "bench.json", benches.record())
    write_json(place / "frames.json", frames.record())
    shutil.copy(SAMPLING, place)
    shutil.copy(SESSIONS, place)
    broken.write(place / "broken")
    answers.export(place / "bundle")
    write_json(place / "answers.json", answers.answers(place / "bundle"))


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a value as UTF-8."""
    file.write_text(json.dumps(value, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
