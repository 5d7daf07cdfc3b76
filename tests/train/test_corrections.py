"""What is wrong is said before any work, what was done stays whole, and a corrected command is not
refused.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssdevice.adapters.settings import read_settings
from ssdevice.cli import main
from ssdevice.config import Mode, StreamConfig
from ssdevice.data import Example
from ssdevice.errors import ConfigError
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.train import checkpoint, optimization
from ssdevice.train.evaluation import dev_prompts
from ssdevice.train.options import Objective, TrainOptions
from tests.train.test_run import base, command, data  # noqa: F401  # fixtures

OPTIONS = TrainOptions(model="m", data=(Path("a"),), app="abc", out=Path("out"))
LOSSLESS = StreamConfig(mode=Mode.LOSSLESS, lora_rank=0)


def test_a_run_is_known_by_its_contents_not_its_paths(tmp_path: Path) -> None:
    for name, text in (("one", "x"), ("copy", "x"), ("other", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "streams.json").write_text(text)

    def of(data: str, init: str, row: str) -> str:  # noqa: F811
        options = replace(OPTIONS, data=(Path(data),), init=tmp_path / init)
        return options.fingerprint("sha", 1, [Example("a", row)])

    assert of("a.jsonl", "one", "b") == of("elsewhere/a.jsonl", "copy", "b")
    assert (
        len({of("a.jsonl", "one", "b"), of("a.jsonl", "other", "b"), of("a.jsonl", "one", "c")})
        == 3
    )


def test_dev_prompts_are_chosen_by_their_own_length(base: Path) -> None:  # noqa: F811
    tokenizer = open_tokenizer(base)
    rows = [Example("a", "b " * 90), Example("a " * 40, "b")]
    found = dev_prompts(replace(OPTIONS, max_length=64), rows, tokenizer)
    assert [list(sample.ids) for sample in found] == [tokenizer.prompt_ids("a")]


def test_dev_rows_are_checked_before_training(
    base: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dev = tmp_path / "dev.jsonl"
    long, short = ({"prompt": "a " * n, "completion": "b"} for n in (40, 1))
    again = [
        *command(base, data, tmp_path / "x", "--steps", "1", "--max-length", "64")[3:],
        "--dev",
        str(dev),
    ]
    dev.write_text(json.dumps(long))
    assert main(again) == 2
    said = capsys.readouterr().err
    assert "--dev" in said and "32 tokens or fewer, half of --max-length" in said
    assert not (tmp_path / "x").exists()
    dev.write_text(f"{json.dumps(long)}\n{json.dumps(short)}\n")
    assert main(again) == 0
    assert "1 of 2 dev prompts exceed half of --max-length: left out" in capsys.readouterr().err


def test_streams_to_go_on_from_decide_what_was_not_asked_for(
    base: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("--gamma", "2", "--mode", "lossless", "--adapter-rank", "3", "--steps", "1")
    assert main(command(base, data, tmp_path / "one", *given)[3:]) == 0
    more = (
        "--init",
        str(tmp_path / "one"),
        "--self-distill",
        "--answer-tokens",
        "3",
        "--steps",
        "1",
    )
    again = command(base, data, tmp_path / "two", *more)[3:]
    assert main([*again, "--gamma", "3"]) == 2
    assert capsys.readouterr().err.strip().endswith("was trained with --gamma 2, not 3")
    assert not (tmp_path / "two").exists()
    assert main(again) == 0
    assert read_settings(tmp_path / "two").streams == read_settings(tmp_path / "one").streams


@pytest.mark.parametrize(
    "change",
    [
        {"steps": -5},
        {"steps": 0},
        {"limit": 0},
        {"seed": -1},
        {"batch_size": 0},
        {"segment": 0},
        {"answer_tokens": 0},
        {"max_length": 1},
        {"self_prompt": 0, "data": ()},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"lr": 0.0},
        {"alpha_stream": -1.0},
        {"alpha_stream": float("nan")},
        {"streams": LOSSLESS, "alpha_stream": 0.0},
    ],
)
def test_numbers_that_cannot_train_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected|nothing is learned"):
        replace(OPTIONS, **change)


def test_next_token_training_refuses_what_it_would_drop() -> None:
    for change in ({"instruction": "Sum up."}, {"dev": Path("dev")}):
        with pytest.raises(ConfigError, match="next-token training has no streams"):
            replace(OPTIONS, objective=Objective.NEXT_TOKEN, **change)


def test_a_run_without_a_step_can_be_corrected(
    base: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    again = command(base, data, tmp_path / "x", "--objective", "next-token", "--steps", "1")[3:]
    assert main([*again, "--lora-rank", "0"]) == 2
    assert "nothing to train" in capsys.readouterr().err and not (tmp_path / "x").exists()
    assert main(again) == 0


def test_training_that_diverges_stops_and_keeps_the_last_good_checkpoint(
    base: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    again = command(base, data, tmp_path / "x", "--steps", "4")[3:]
    monkeypatch.setattr(optimization, "CHECKPOINT_SECONDS", 0.0)
    backward = optimization._backward
    steps = list[int]()

    def third_is_nan(*arguments: Any) -> torch.Tensor:
        steps.append(1)
        return backward(*arguments) * (float("nan") if len(steps) == 3 else 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(optimization, "_backward", third_is_nan)
        assert main(again) == 1
    assert "the loss is not finite at step 3; lower --lr" in capsys.readouterr().err
    left = checkpoint.load(tmp_path / "x")
    assert left is not None and left["step"] == len(left["history"]) == 2
    assert main(again) == 0


def test_an_interrupt_within_a_step_does_not_count_it_twice(
    base: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--steps", "4", "--mode", "lossless", "--precision", "fp32")
    monkeypatch.setattr(optimization, "CHECKPOINT_SECONDS", 0.0)
    assert main(command(base, data, tmp_path / "whole", *options)[3:]) == 0
    step = torch.optim.AdamW.step
    steps = list[int]()

    def interrupted(*arguments: Any, **named: Any) -> Any:
        step(*arguments, **named)
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt

    again = command(base, data, tmp_path / "stopped", *options)[3:]
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", interrupted)
        assert main(again) == 130
    assert main(again) == 0
    expected, found = (
        load_file(tmp_path / name / "streams.safetensors") for name in ("whole", "stopped")
    )
    for (
        name,
        value,
    ) in expected.items():  # stored in float16, where a difference of 1e-8 may be a unit
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.wide
def test_quiet_training_says_only_what_it_wrote(base: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    """No progress bars of the frameworks, and the hub is not asked about the base."""
    out = tmp_path / "x"
    done = subprocess.run(
        command(base, data, out, "--steps", "1", "--quiet"), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, f"wrote {out}\n")
