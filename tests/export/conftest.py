"""A tiny base and adapters for it, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdevice.config import Mode
from tests.export.models import write_adapter, write_base, write_lora


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("shared") / "adapter", base)


@pytest.fixture(scope="session")
def lossless(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lossless") / "adapter", base, Mode.LOSSLESS)


@pytest.fixture(scope="session")
def with_lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared streams with a LoRA on every linear."""
    folder = tmp_path_factory.mktemp("with-lora") / "adapter"
    return write_lora(write_adapter(folder, base), base, rank=6)


@pytest.fixture(scope="session")
def plain_lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PEFT's own, with everything in its config that changes numbers, on some of the linears."""
    folder = tmp_path_factory.mktemp("plain-lora") / "adapter"
    return write_lora(
        folder, base, seed=5, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"v_proj": 2, "layers.1.self_attn.q_proj": 3}, alpha_pattern={"down_proj": 5},
    )  # fmt: skip
