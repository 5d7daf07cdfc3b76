"""Data that live beside the repository, where there are any."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data(repository: Path) -> Path:
    """Application data in ``../shared/data``: folders with ``dev.jsonl.gz``."""
    folder = repository.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no application data in ../shared/data")
    return folder
