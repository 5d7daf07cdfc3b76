"""A tiny base and adapters for it, made once a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdevice.config import Mode
from tests.export.models import write_adapter, write_base, write_lora
from tests.once import made_once


@pytest.fixture(scope="session")
def base() -> Path:
    return made_once("export/base", write_base)


@pytest.fixture(scope="session")
def adapter(base: Path) -> Path:
    return made_once("export/shared", lambda out: write_adapter(out, base))


@pytest.fixture(scope="session")
def lossless(base: Path) -> Path:
    return made_once("export/lossless", lambda out: write_adapter(out, base, Mode.LOSSLESS))


@pytest.fixture(scope="session")
def with_lora(base: Path) -> Path:
    """Shared streams with a LoRA on every linear."""
    return made_once(
        "export/with-lora", lambda out: write_lora(write_adapter(out, base), base, rank=6)
    )


@pytest.fixture(scope="session")
def plain_lora(base: Path) -> Path:
    """PEFT's own, with everything in its config that changes numbers, on some of the linears."""
    options = {
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 3},
        "alpha_pattern": {"down_proj": 5},
    }
    return made_once("export/plain-lora", lambda out: write_lora(out, base, seed=5, **options))


@pytest.fixture(scope="session")
def waiting(base: Path) -> Path:
    """Streams that see the token just chosen, with f; g has enough weights to be quantized, if it
    could be.
    """
    return made_once(
        "export/waiting",
        lambda out: write_adapter(out, base, Mode.LOSSLESS, token_rank=65, init_rank=4),
    )
