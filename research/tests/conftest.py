"""Experiments are tested as the product is: one thread, no network, no skips but those allowed."""

from tests.conftest import pytest_collection_finish, pytest_configure, repository
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "repository",
]
