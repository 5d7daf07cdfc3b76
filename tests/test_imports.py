"""Running a bundle never loads a training framework, and the command line starts without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ssdevice.cli import COMMANDS

HEAVY = ("torch", "transformers", "peft", "coremltools", "executorch", "torchao", "onnx", "onnxscript", "matplotlib")
CORE = ("errors", "tree", "contract", "config", "bundle", "data", "cli", "mil.program", "runtime", "bench")


def loaded_by(repository: Path, code: str) -> set[str]:
    """Top-level modules in memory after ``code`` has run in a fresh interpreter."""
    report = "import json, sys; print('\\n' + json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=repository, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", CORE)
def test_import_loads_no_framework(repository: Path, name: str) -> None:
    assert not loaded_by(repository, f"import ssdevice.{name}") & set(HEAVY)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_loads_no_framework(repository: Path, command: str | None) -> None:
    code = f"""
from ssdevice.cli import main
try:
    code = main({[command, "--help"] if command else ["--help"]!r})
except SystemExit as stop:
    code = stop.code
assert not code, code
"""
    loaded = loaded_by(repository, code)
    assert not loaded & set(HEAVY)
    if command is None:
        assert not loaded & {"onnxruntime", "numpy", "rich"}
