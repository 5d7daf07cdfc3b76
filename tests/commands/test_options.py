"""What every command does with numbers that are none, outputs that cannot be written, and options
without an effect.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ssdevice.cli import COMMANDS, TERMINATED, command_module
from ssdevice.commands.sampling import HELP
from tests.commands.test_run import call
from tests.runtime import tiny_bundle as tiny

REQUIRED = {
    "train": ["--model", "m", "--data", "d", "--app", "a", "--out", "o"],
    "export": ["--model", "m", "--target", "onnx"],
    "run": ["b", "--data", "d"],
    "chat": ["b"],
    "bench": ["b", "--data", "d"],
    "peers": ["b", "--data", "d", "--model", "m"],
    "verify": ["b"],
    "tune": ["b", "--data", "d"],
    "web": ["b"],
    "serve": ["b"],
}
"""A call of each command with what it cannot do without: names of files that do not exist."""
OWN_PROMPTS = ["--model", "m", "--app", "a", "--out", "o"]
BESIDE = {
    ("train", "--self-prompt"): OWN_PROMPTS,
    ("run", "--logprobs"): ["b", "--data", "d", "--json"],
}
CHOICE = {f"--{name.replace('_', '-')}" for name in HELP}
"""Options of how tokens are chosen."""
POSITIVE = {"--top-p", "--typical-p", "--repetition-penalty"}
SIGNED = {"--presence-penalty", "--frequency-penalty"}
ZERO = {
    "--threads",  # all cores
    "--port",  # any free one
    "--queue",  # nobody waits
    "--draft-layers",  # streams
    "--msa-layers",
    "--init-rank",
    "--token-rank",
    "--follow-rank",
    "--lora-rank",
    "--adapter-rank",  # none
    "--draft-vocabulary",  # all tokens
    "--alpha-stream",
    "--soft-labels",
    "--seed",
}
"""Options for which 0 means something."""
TEXTS = {"--sizes": ("2,0", "2,nan", "2,-4"), "--tree": ("chain:0", "chain:nan", "chain:-1")}


def numeric() -> list[tuple[str, str, str]]:
    """(command, option, value) of every option that takes a number."""
    found = []
    for name in COMMANDS:
        parser = argparse.ArgumentParser()
        command_module(name).add_arguments(parser)
        for action in parser._actions:
            option = action.option_strings[-1] if action.option_strings else ""
            if action.type in (int, float) or "whole.<locals>" in getattr(
                action.type, "__qualname__", ""
            ):
                wrong = ["nan", "inf", "-inf", "1e999", "0.5.", ""] + (
                    [] if option in SIGNED else ["-1"]
                )
                may_be_0 = option in ZERO or (
                    name in ("run", "chat", "bench", "peers") and option in CHOICE - POSITIVE
                )
                found += [(name, option, value) for value in (wrong if may_be_0 else [*wrong, "0"])]
            found += [(name, option, value) for value in TEXTS.get(option, ())]
    return found


NUMERIC = numeric()


def test_the_table_has_every_number_of_every_command() -> None:
    assert {name for name, _, _ in NUMERIC} == {*COMMANDS} - {"kernels", "bundle", "inspect"}, (
        "which take none"
    )
    assert len({(name, option) for name, option, _ in NUMERIC}) > 45


@pytest.mark.parametrize("command", sorted({name for name, _, _ in NUMERIC}))
def test_a_number_that_means_nothing_is_refused_by_the_name_of_its_option(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # where none of the files exist
    for name, option, value in NUMERIC:
        if name != command:
            continue
        given = [*BESIDE.get((name, option), REQUIRED.get(name, [])), f"{option}={value}"]
        assert call(name, *given) == 2, given
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith("ssdevice: error: "), (given, said)
        assert option.replace("-", "") in said.replace("-", "").replace("_", ""), (given, said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "run b",
            "one of the arguments --prompt --data --messages is required; see ssdevice run --help",
        ),
        (
            "run b --prompt a --unheard-of",
            "unrecognized arguments: --unheard-of; see ssdevice run --help",
        ),
        ("run b --promt a", "arguments: --promt (did you mean --prompt?); see ssdevice run --help"),
        ("run b --promt=a", "arguments: --promt (did you mean --prompt?); see ssdevice run --help"),
        ("run b c --prompt a", "unrecognized arguments: c; see ssdevice run --help"),
        ("bundle sign b --kye k", "--kye (did you mean --key?); see ssdevice bundle sign --help"),
        ("bundle --dbug sign b", "--dbug (did you mean --debug?); see ssdevice bundle --help"),
        ("bundle sgin b", "ACTION: invalid choice: 'sgin' (did you mean sign?)"),
        ("--verson", "--verson (did you mean --version?); see ssdevice --help"),
        ("nonsense", "invalid choice: 'nonsense'"),
        ("exprot", "argument COMMAND: invalid choice: 'exprot' (did you mean export?)"),
        ("export --model m --target onx", "invalid choice: 'onx' (did you mean onnx?)"),
        ("bundle", "the following arguments are required: ACTION; see ssdevice bundle --help"),
        (
            "bundle sign b",
            "the following arguments are required: --key; see ssdevice bundle sign --help",
        ),
        ("export --model m --target abacus", "invalid choice: 'abacus'"),
    ],
)
def test_wrong_usage_is_one_line(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*given.split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelled_option_of_any_command_is_told_the_nearest(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything else is missing, so that the misspelled option is what is named."""
    parser = argparse.ArgumentParser()
    command_module(command).add_arguments(parser)
    options = [name for action in parser._actions for name in action.option_strings]
    for option in {*options, "--debug"} - {"-h"}:
        wrong = f"{option[:-1]}qq"
        assert call(command, wrong) == 2
        said = capsys.readouterr().err
        assert f"unrecognized arguments: {wrong} (did you mean --" in said
        assert f"; see ssdevice {command} --help" in said


@pytest.fixture
def data(tmp_path: Path) -> str:
    file = tmp_path / "data.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": p}) for p in ("hello", "what now", "b", "c", "d")) + "\n"
    )
    return str(file)


def filled(text: str, **more: str) -> str:
    """The text with what its capital words stand for."""
    names = {"BUNDLE": tiny.tiny_bundle().folder, "BASE": tiny.tiny_bundle(streams=False).folder}
    names |= {"MODEL": tiny.base_folder(), "ADAPTER": tiny.adapter_folder()}
    for name, value in {**names, **more}.items():
        text = text.replace(name, str(value))
    return text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("run BUNDLE --prompt a --limit 3", "--limit has no effect: it goes with --data"),
        ("chat BUNDLE --logprobs 3", "--logprobs has no effect: it goes with ssdevice run --json"),
        ("bench BUNDLE --data DATA --profile --json x.json", "--json has no effect: --profile"),
        ("bench BUNDLE --data DATA --profile --rounds 3", "--rounds has no effect: --profile"),
        (
            "verify BUNDLE --integrity-only --model m",
            "--model has no effect: --integrity-only runs nothing",
        ),
        ("verify BUNDLE --integrity-only --max-tokens 64", "--max-tokens has no effect"),
        (
            "verify BASE --model MODEL --adapter ADAPTER",
            "app 'base' of BASE is the base without one",
        ),
        ("tune BUNDLE --data DATA --quant int8", "--quant has no effect: a "),
        ("tune BUNDLE --data DATA --target onnx", "--target has no effect: a "),
        ("tune --model m --adapter a=b --data DATA --app b", "--app has no effect: trial bundles"),
        (
            "tune --model m --adapter a=b --data DATA --require-signature k",
            "--require-signature has no effect",
        ),
        (
            "tune BUNDLE --data DATA --cost-table x --cost-of b",
            "--cost-of has no effect: --cost-table times nothing",
        ),
        ("web BUNDLE --out x --port 8080", "--port has no effect: --out writes the page"),
        ("export --model MODEL --target onnx --kv-write slice", "are Core ML's, not onnx's"),
        (
            "export --model MODEL --target executorch --compute-units cpu_and_gpu",
            "are Core ML's, not executorch's",
        ),
        (
            "export --model MODEL --target coreml --delegate xnnpack",
            "are ExecuTorch's, not coreml's",
        ),
        ("kernels --target coreml", "--target coreml: there is nothing to compile"),
    ],
)
def test_an_option_without_an_effect_is_refused(
    given: str, message: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = filled(given, DATA=data).split(), filled(message)
    capsys.readouterr()  # what making the bundles said
    assert call(*words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, said


def work(*_: object, **__: object) -> None:
    """In place of what takes minutes."""
    raise AssertionError("the work had begun")


@pytest.mark.parametrize("where", ["FILE/inside", "/proc/out"])
@pytest.mark.parametrize(
    "given",
    [
        "bench BUNDLE --data DATA --json OUT",
        "bench BUNDLE --data DATA --report OUT",
        "peers BUNDLE --model MODEL --data DATA --genai OUT",
        "tune BUNDLE --data DATA --out OUT",
        "tune BUNDLE --data DATA --write-cost-table OUT",
        "export --model MODEL --target onnx --out OUT",
        "train --model MODEL --data DATA --app a --out OUT",
        "web BUNDLE --out OUT",
        "demo --keep OUT",
    ],
)
def test_an_output_that_cannot_be_written_is_found_before_the_work(
    given: str,
    where: str,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if where.startswith("/proc") and not Path("/proc/self").exists():
        where = "FILE/inside"
    for place in (
        "runtime.session.Session.open",
        "export.stages.export_plan",
        "train.trainer.train",
        "commands.web.site",
        "commands.demo._call",
    ):
        monkeypatch.setattr(f"ssdevice.{place}", work)
    file = tmp_path / "file"
    file.write_text("")
    out = where.replace("FILE", str(file))
    assert call(*filled(given, DATA=data, FILE=str(file), OUT=out).split()) == 2
    said = capsys.readouterr().err
    assert out.rpartition("/")[0] in said and said.count("\n") == 1, said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_what_could_not_be_written_in_the_end_is_named(
    data: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = str(tiny.tiny_bundle().folder)
    command = [
        "tune",
        bundle,
        "--data",
        data,
        "--max-tokens",
        "60",
        "--threads",
        "1",
        "--quiet",
        "--out",
        "/dev/full",
    ]
    assert call(*command) == 1
    assert "the disk is full: /dev/full could not be written" in capfd.readouterr().err
    words = [sys.executable, "-m", "ssdevice", "inspect", bundle, "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "ssdevice: error: standard output: No space left on device\n",
    )


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_closed_streams_take_what_they_are_told(data: str) -> None:
    bundle = str(tiny.tiny_bundle().folder)

    def told(closed: str, *words: str) -> tuple[int, str]:
        command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "ssdevice", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout

    assert told("2>&-", "run", "nowhere", "--prompt", "x") == (2, "")
    assert (
        told("2>&-", "bench", bundle, "--data", data, "--rounds", "1", "--max-tokens", "3")[0] == 0
    )  # progress
    assert told(">&- 2>&-", "inspect", bundle)[0] == 0


def test_data_and_model_are_read_before_the_work(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("runtime.session.Session.open", "export.stages.export_plan"):
        monkeypatch.setattr(f"ssdevice.{place}", work)
    for given in ("tune BUNDLE", "tune --model MODEL --adapter app=ADAPTER", "verify BUNDLE"):
        assert call(*filled(given).split(), "--data", "nowhere.jsonl") == 2
        assert "nowhere.jsonl: no such file" in capsys.readouterr().err
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 600}) + "\n")
    assert (
        call(*filled("tune --model MODEL --adapter app=ADAPTER").split(), "--data", str(long)) == 2
    )
    assert "long.jsonl, prompt 1: the prompt has" in capsys.readouterr().err
    for given in (
        "verify BUNDLE --model nowhere --adapter ADAPTER",
        "verify BUNDLE --model MODEL --adapter nowhere",
    ):
        assert call(*filled(given).split()) == 2
        assert "nowhere: no such folder" in capsys.readouterr().err


TRIALS = """
import sys, time
from ssdevice.cli import main
from ssdevice.commands import tune
def trials(args, table, examples, folder, progress):
    (folder / "trial").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
tune._trials = trials
sys.exit(main(sys.argv[1:]))
"""


def test_a_terminated_command_leaves_no_folder_behind(data: str) -> None:
    command = ["tune", "--model", "m", "--adapter", "a=b", "--data", data, "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-c", TRIALS, *command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert (folder / "trial").is_file()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == TERMINATED and not folder.exists()
