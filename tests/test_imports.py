"""Running a bundle never loads a training framework, and the command line starts without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ssdevice.cli import COMMANDS

HEAVY = (
    "torch",
    "transformers",
    "peft",
    "coremltools",
    "executorch",
    "torchao",
    "coreai",
    "onnx",
    "onnxscript",
    "matplotlib",
)
CORE = (
    "errors",
    "tree",
    "contract",
    "config",
    "bundle",
    "data",
    "cli",
    "mil.program",
    "runtime",
    "bench",
)


def loaded_by(repository: Path, code: str) -> set[str]:
    """Top-level modules in memory after ``code`` has run in a fresh interpreter."""
    report = (
        "import json, sys; "
        "print('\\n' + json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", CORE)
def test_import_loads_no_framework(repository: Path, name: str) -> None:
    assert not loaded_by(repository, f"import ssdevice.{name}") & set(HEAVY)


HELP = """
from ssdevice.cli import main
try:
    code = main([*{words!r}, "--help"])
except SystemExit as stop:
    code = stop.code
assert not code, code
"""


def test_help_loads_no_framework(repository: Path) -> None:
    assert not loaded_by(repository, HELP.format(words=[])) & {
        *HEAVY,
        "onnxruntime",
        "numpy",
        "rich",
    }
    # One interpreter for all commands: what one of them loads stays, and an interpreter costs more
    # than a help.
    assert not loaded_by(
        repository, "".join(HELP.format(words=[command]) for command in COMMANDS)
    ) & set(HEAVY)
