"""A process that was forked while kernels ran: it has none of their threads, and runs kernels all
the same.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ssdevice.runtime.onnx import kernels
from tests.compiled_kernels import COMPILER, NO_COMPILER, built, native_objects

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER),
]
RIGHT = "0 hung, 0 wrong\n"


def test_a_crew_works_in_every_child(tmp_path: Path) -> None:
    """Of 600 children 23 hung while they had the crew of their parent."""
    program = tmp_path / "forks"
    crew = native_objects()[str(kernels.SOURCES / "crew.cpp")]
    source = Path(__file__).with_name("forks.cpp")
    flags = [each for each in kernels.FLAGS if each != "-shared"]
    command = [str(COMPILER), *flags, "-I", str(kernels.SOURCES), "-o", str(program)]
    subprocess.run([*command, str(source), crew, "-ldl"], check=True)
    done = subprocess.run([program, "600"], capture_output=True, text=True)
    assert done.stdout == RIGHT


def test_sessions_run_in_every_child() -> None:
    command = [sys.executable, "-m", "tests.runtime.onnx.forks", str(built("native")), "30"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == RIGHT, done.stderr
