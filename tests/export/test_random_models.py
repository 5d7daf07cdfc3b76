"""Right models of every shape are accepted in INT4, whatever their rows have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.random_models import SHAPES, export, write


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_a_right_random_model_is_accepted(tmp_path: Path, seed: int) -> None:
    write(tmp_path / "model", seed)
    assert export(tmp_path / "model", seed) == 0
