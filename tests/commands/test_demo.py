"""The demo on what the source ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdevice.commands import demo
from tests.commands.test_run import call


def test_a_missing_model_is_said_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("demo", "--models", str(tmp_path)) == 2
    assert "base-7m is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_decodes_faster_paths_to_the_same_tokens(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (repository / "models" / demo.ADAPTER).is_dir():
        pytest.skip("the shipped adapter is not part of this tree")
    assert call("demo", "--prompts", "4", "--threads", "1") == 0
    text = capsys.readouterr().out
    assert "All decoding modes gave the same tokens." in text and "tokens per step" in text
