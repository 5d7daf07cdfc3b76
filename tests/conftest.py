"""What all tests share: one thread, no network, hypothesis without deadlines, no skips under CI but
those allowed.
"""

from __future__ import annotations

import gc
import os

gc.disable()  # until all test modules and what they import are loaded: of that nothing is garbage

# Before any test module can import torch, onnxruntime or transformers: they read these at import.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MPLBACKEND": "Agg",
    "SSDEVICE_KERNELS": "/nowhere",  # only tests of the kernels use them
}.items():
    os.environ.setdefault(_name, _value)

import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from xdist.scheduler import LoadFileScheduling  # noqa: E402

from tests import once  # noqa: E402
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: E402, F401

# Timing is never asserted: a loaded machine must not fail a test. CI draws the same examples every
# time.
settings.register_profile("local", deadline=None, max_examples=60)
settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


FIRST = ("export", "fuzz", "soak", "train")
"""Folders whose tests take longest."""
TOGETHER = "executorch"
"""The folder, here and there, whose tests share programs that take minutes to make: one process
runs them all, so that no other waits for it.
"""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """A file runs in one process, those that belong together in the same one."""

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if f"/{TOGETHER}/" in nodeid else super()._split_scope(nodeid)

    gc.enable()  # the process that starts the others collects no tests itself
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that the processes of a run end together."""
    here = Path(__file__).parent

    def order(item: pytest.Item) -> tuple[bool, bool]:
        parts = item.path.relative_to(here).parts
        return TOGETHER not in parts, parts[0] not in FIRST

    items.sort(key=order)


def pytest_collection_finish() -> None:
    """From now on no search for garbage goes over the loaded modules: five in an export took a
    third of its time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder for what is made once a run, in the process that starts the others."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="ssdevice-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[once.VARIABLE] = folder.name
