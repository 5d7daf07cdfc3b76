"""The demo on what the source ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdevice.commands import demo
from ssdevice.data import read_examples
from tests.commands.test_run import call


def test_a_missing_model_is_said_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("demo", "--models", str(tmp_path)) == 2
    assert "base-7m is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_decodes_faster_paths_to_the_same_tokens(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (repository / "models" / demo.ADAPTER).is_dir():
        pytest.skip("the shipped adapter is not part of this tree")
    assert call("demo", "--prompts", "4", "--threads", "1") == 0
    text = capsys.readouterr().out
    assert "All decoding modes gave the same tokens on all 4 prompts." in text and "prefill" in text
    assert [line.split()[2] for line in text.splitlines() if line.startswith("$ ")] == [
        "export",
        "run",
        "bench",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--smollm2", "--models", "{empty}"],
            "holds no adapter; give --adapter DIR, or train one",
        ),
        (
            ["--smollm2", "--adapter", "{empty}", "--models", "{empty}"],
            "the weights are not here; install them",
        ),
        (
            ["--smollm2", "--adapter", "{empty}", "--model", "/nonexistent"],
            "/nonexistent is missing",
        ),
        (["--model", "{empty}"], "--model is for --smollm2"),
    ],
)
def test_what_smollm2_needs_is_said_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "PACKAGE", "a-package-that-nobody-installed")
    (tmp_path / "empty").mkdir()
    assert call("demo", *(part.format(empty=tmp_path / "empty") for part in arguments)) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_smollm2_takes_the_adapter_that_is_there_with_prompts_that_fit_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    repository: Path,
) -> None:
    called: list[tuple[str, ...]] = []

    def stop(_: object, *words: str) -> None:
        called.append(words)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_call", stop)
    adapters = tmp_path / "adapters" / demo.NAME
    (tmp_path / "prompts").mkdir()
    for prompts in (demo.QUESTIONS, demo.PROMPTS):
        (tmp_path / prompts).write_text('{"prompt": "Why?"}\n')
    for name, (app, _, tree) in reversed(demo.TASKS.items()):
        (adapters / name).mkdir(parents=True)
        assert call("demo", "--smollm2", "--models", str(tmp_path), "--model", str(tmp_path)) == 130
        assert called[-1][0] == "export" and f"{app}={adapters / name}" in called[-1]
        assert called[-1][-7:-2] == ("onnx", "--quant", "int4", *tree) and tree[0] == "--tree"
    other = tmp_path / "mine"
    other.mkdir()
    arguments = [
        "--smollm2",
        "--adapter",
        str(other),
        "--models",
        str(tmp_path),
        "--model",
        str(tmp_path),
    ]
    capsys.readouterr()
    assert call("demo", *arguments) == 130
    assert "Streams of mine: if they learned another task" in capsys.readouterr().out


def test_general_questions_can_be_read(repository: Path) -> None:
    assert len(read_examples(repository / "models" / demo.QUESTIONS, require_completion=False)) >= 5
