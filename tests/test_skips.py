"""Under CI a skip fails the run unless its reason is allowed; elsewhere it is a skip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN_IMPORT = """
import pytest
pytest.importorskip("no_such_package")
def test_that_never_runs(): pass
"""
SKIPS = """
import pytest
def test_in_its_course(): pytest.skip("not today")
@pytest.mark.skip("not ever")
def test_by_a_mark(): pass
@pytest.fixture
def broken(): pytest.skip("not with this fixture")
def test_in_a_fixture(broken): pass
def test_allowed(): pytest.skip("no application data in ../shared/data")
@pytest.mark.xfail(reason="known")
def test_known_to_fail(): assert False
def test_that_runs(): pass
"""


def run(repository: Path, folder: Path, ci: bool, *options: str) -> tuple[int, str]:
    """Exit code and output of pytest over ``folder`` with the rule and nothing else of this
    repository.
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.skips",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(folder),
            *options,
            str(folder),
        ],
        env={**environment, "PYTHONPATH": str(repository), **({"CI": "1"} if ci else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_skip_fails_under_ci_unless_it_is_allowed(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    code, said = run(repository, tmp_path, True)
    assert code == 1 and "1 passed, 1 skipped, 1 xfailed" in said, said
    for reason in ("not today", "not ever", "not with this fixture"):
        assert f"skipped under CI: '{reason}' is not among" in said
    assert "no application data" not in said


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.wide)])
def test_a_module_that_turns_itself_off_fails_under_ci(
    repository: Path, tmp_path: Path, processes: int
) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN_IMPORT)
    code, said = run(repository, tmp_path, True, "-n", str(processes))
    assert code not in (0, 5) and "could not import 'no_such_package'" in said, said


def test_elsewhere_a_skip_is_a_skip(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_broken.py").write_text(BROKEN_IMPORT)
    code, said = run(repository, tmp_path, False)
    assert code == 0 and "1 passed, 5 skipped, 1 xfailed" in said, said
