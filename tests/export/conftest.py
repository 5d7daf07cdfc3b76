"""A tiny base and adapters for it, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdevice.config import Mode
from tests.export.models import write_adapter, write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("shared") / "adapter", base)


@pytest.fixture(scope="session")
def lossless(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lossless") / "adapter", base, Mode.LOSSLESS)
