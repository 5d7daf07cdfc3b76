"""Under CI a skip is an error unless its reason is listed here: else a package that fails to import
passes in green.

A pytest plugin; tests/conftest.py takes it in. ``CI`` set in the environment means CI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

ALLOWED = {
    r"no application data in \.\./shared/data": "the data sets are not part of the repository",
    r"no downloaded model.*": "nor are models of other makers",
    r"needs qemu.*": "an emulator of other processors is a package of the system, "
    "and installing those takes root",
    r"needs a C\+\+ compiler.*|needs aarch64-linux-gnu-g\+\+.*": "so is a compiler",
    r"needs nlohmann/json.*": "so is a library for JSON in C++",
    r"needs node|needs Chromium": "so are a browser and what runs its scripts",
    r"needs the packages of `make web`": "they come from another registry",
    r"needs coreai-core and coreai-torch": "pre-releases, which only their own extra installs",
    r"needs a Mac.*": "Core ML itself runs nowhere else",
    r"needs (langchain-openai|instructor|pydantic-ai)": "frameworks of agents, with many packages "
    "of their own",
    r"these run in the interpreter|there Core ML itself opens a package": "a Mac's Core ML does it",
    r"the size of the process is read from /proc|sizes of processes are read from /proc": "only "
    "Linux has /proc",
    r"counts events of Linux": "inotify, which other systems lack",
    r"needs /dev/full": "only Linux has a device that is always full",
    r"no named pipes here|no fork here": "Windows has none",
    r"needs \d+ GiB of disk": "a large model is written for the length of one slow test",
}
"""Reasons (patterns of the whole text), and why each can hold on a machine that is set up as it
should be.
"""


def complaint(reason: str) -> str | None:
    """What is wrong with a skip for this reason on this machine; None: nothing."""
    if not os.environ.get("CI") or any(
        re.fullmatch(pattern, reason, re.DOTALL) for pattern in ALLOWED
    ):
        return None
    return f"skipped under CI: {reason!r} is not among the reasons that tests/skips.py allows"


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Why a test or a module was skipped; None where it was not, or where it failed as expected
    (xfail).
    """
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of a skip that is not allowed."""
    reason = reason_of(report)
    if reason is not None and (wrong := complaint(reason)):
        report.outcome = "failed"
        report.longrepr = wrong


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge a test that was skipped, by a mark or in its course."""
    report = yield
    judge(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge a module that was skipped whole, as ``pytest.importorskip`` at its head does."""
    report = yield
    judge(report)
    return report
