"""``run``, ``inspect`` and ``verify`` on a tiny bundle, as a user calls them."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssdevice.cli import main
from ssdevice.commands import inspect
from ssdevice.commands.run import Trace
from ssdevice.contract import DRAFT, VERIFY, VERIFY_PLAIN, functions
from ssdevice.runtime.generation import Run
from ssdevice.tree import Tree
from tests.runtime import tiny_bundle as tiny
from tests.runtime.scripted import make_tokenizer


@pytest.fixture(scope="module")
def bundle() -> str:
    return str(tiny.tiny_bundle("fp32").folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, "completion": "a"} for text in ("hello", "what now", "b")]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def call(*args: str) -> int:
    """The exit code of the command line."""
    try:
        return main([*args])
    except SystemExit as stop:  # argparse
        assert isinstance(stop.code, int)
        return stop.code


def test_plain_and_speculative_print_the_same(
    bundle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("run", bundle, "--prompt", "hello", "--max-tokens", "12", "--threads", "1") == 0
    first = capsys.readouterr()
    assert (
        call("run", bundle, "--prompt", "hello", "--max-tokens", "12", "--no-speculate", "--quiet")
        == 0
    )
    second = capsys.readouterr()
    assert first.out == second.out and len(first.out.rstrip("\n")) >= 1
    assert "12 tokens" in first.err and "tokens per step" in first.err
    assert second.err == ""


def test_json_has_one_object_a_prompt(
    bundle: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        call("run", bundle, "--data", str(data), "--limit", "2", "--json", "--max-tokens", "9") == 0
    )
    out = capsys.readouterr()
    rows = [json.loads(line) for line in out.out.splitlines()]
    assert [row["prompt"] for row in rows] == ["hello", "what now"]
    for row in rows:
        assert sum(row["accepted"]) == len(row["tokens"]) - 1 and row["steps"] == len(
            row["accepted"]
        )
        assert row["reason"] in ("stop", "max_tokens") and row["seconds"] > 0
    assert out.err == ""


def test_a_trace_has_a_line_a_step(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", bundle, "--prompt", "hello", "--max-tokens", "9", "--trace") == 0
    out = capsys.readouterr()
    lines = out.out.splitlines()
    steps = int(out.err.split(" steps")[0].split()[-1])
    assert lines[0] == "> hello" and lines[1].startswith("prefill") and len(lines) == steps + 2


@pytest.mark.parametrize("drafts", [2, 4])
def test_a_trace_shows_what_steps_of_each_length_accepted(drafts: int) -> None:
    trace = Trace(make_tokenizer(), Tree.chain(4))
    ids = np.arange(40, 45, dtype=np.int32)
    for accepted in range(drafts + 1):
        run = Run((*ids[:accepted].tolist(), 50), "", None, ids[:drafts, None])
        line = trace.line(run)
        assert [str(span.style) for span in line.spans].count("green") == accepted
        assert line.plain.count("[") == drafts - accepted


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_prompt_comes_from_standard_input(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: bytes
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello" + end)))
    assert call("run", bundle, "--prompt", "-", "--json", "--max-tokens", "3") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "hello"


def test_a_byte_order_mark_is_no_part_of_a_text(
    bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfhello\r\n")))
    assert call("run", bundle, "--prompt", "-", "--json", "--max-tokens", "3") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "hello"
    (tmp_path / "schema.json").write_bytes(b'\xef\xbb\xbf{"type": "object"}')
    assert call("run", bundle, "--prompt", "x", "--json-schema", str(tmp_path / "schema.json")) == 2
    assert "export it with --choose host" in capsys.readouterr().err  # the file was read


def test_standard_input_that_is_no_text_is_refused(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert call("run", bundle, "--prompt", "-") == 2
    assert capsys.readouterr().err == "ssdevice: error: standard input: not UTF-8 text (byte 2)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "x" * 200], "the bundle was exported for a context of 96"),
        (["--prompt", "a", "--app", "sql"], "has no app 'sql'; it has letters"),
        (["--prompt", "a", "--threads", "-1"], "--threads: -1, expected 0 to 1024"),
        (["--prompt", "a", "--max-tokens", "0"], "expected 1 or more"),
        (["--prompt", "a", "--stop", ""], "stop string is empty"),
        (["--prompt", "\udcff"], "not valid Unicode"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        ([], "one of the arguments --prompt --data --messages is required"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    bundle: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("run", bundle, *arguments) == 2
    out = capsys.readouterr()
    assert message in out.err and out.out == ""
    if arguments and "--max-tokens" not in arguments:
        assert out.err.count("\n") == 1


def test_an_error_names_the_prompt_of_a_data_file(
    bundle: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_text(data.read_text() + json.dumps({"prompt": "x" * 200}) + "\n")
    assert call("run", bundle, "--data", str(data), "--max-tokens", "2", "--json") == 2
    out = capsys.readouterr()
    assert len(out.out.splitlines()) == 3 and "prompt 4: the prompt has" in out.err


@pytest.mark.parametrize("command", ["run", "inspect", "verify", "bench"])
def test_a_folder_that_is_no_bundle_is_refused(
    command: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"run": ["--prompt", "a"], "bench": ["--data", str(data)]}.get(command, [])
    assert call(command, str(tmp_path / "none"), *more) == 2
    assert "no such bundle" in capsys.readouterr().err


def test_inspect_tells_what_is_inside(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("inspect", bundle) == 0
    text = capsys.readouterr().out
    for part in (
        "onnx",
        "fp32",
        "model_type mistral",
        "letters",
        "Go on.",
        "weights.bin",
        "kv_cache_per_token 256",
    ):
        assert part in text
    assert call("inspect", bundle, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    # Keys and values of 2 layers, 128 rows of 2 heads of 8 float32 each.
    assert (
        found["memory"]["kv_cache"] == 2 * 2 * 128 * 2 * 8 * 4
        and found["memory"]["kv_cache_per_token"] == 256
    )
    assert found["bytes"] == sum(found["files"].values())


TOOLS = "{% for t in tools or [] %}<tool_call>{{ t }}</tool_call>{% endfor %}"


@pytest.mark.parametrize(
    ("change", "abilities"),
    [
        ({}, ("streams", False, False, False)),
        ({"streams": False}, ("nothing", False, False, False)),
        ({"streams": False, "repeats": True}, ("the text", False, False, False)),
        ({"choose": True}, ("streams", True, False, False)),
        ({"template": TOOLS}, ("streams", False, True, True)),
        ({"template": TOOLS.replace("tool_call", "call")}, ("streams", False, True, False)),
        ({"template": "{% if"}, ("streams", False, False, False)),
    ],
)
def test_inspect_says_what_a_session_can_do(
    change: dict[str, Any], abilities: tuple[Any, ...]
) -> None:
    manifest = tiny.tiny_bundle(streams=change.get("streams", True)).manifest
    geometry = manifest.geometry
    names = {spec.name for spec in manifest.functions}
    if "repeats" in change:
        geometry = replace(geometry, gamma=4, k=1, tree=Tree.chain(4))
    if "choose" in change:
        geometry = replace(geometry, hidden=manifest.model.hidden_size)
        names |= {VERIFY, VERIFY_PLAIN, DRAFT}
    specs = functions(geometry, manifest.cache, manifest.cache_dtype)
    own = tuple(spec for name, spec in specs.items() if name in names)
    manifest = replace(manifest, geometry=geometry, functions=own)
    if "template" in change:
        manifest = replace(manifest, chat=replace(manifest.chat, template=change["template"]))
    found = inspect.abilities(manifest)
    assert tuple(found.values()) == abilities
    assert list(found) == ["drafts", "samples", "reads_tools", "reads_calls"]
    assert f"drafts from {abilities[0]}; " in inspect.abilities_line(manifest)


def test_verify_compares_arms_and_torch(
    bundle: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--model", str(tiny.base_folder()), "--adapter", str(tiny.adapter_folder())]
    assert (
        call("verify", bundle, "--data", str(data), "--max-tokens", "20", "--threads", "1", *extra)
        == 0
    )
    text = capsys.readouterr().out
    assert "sizes and hashes as in the manifest" in text
    assert all(f"{mode} 3" in text for mode in ("plain_step", "speculative", "forced"))
    assert "prompt ids, logits and first tokens are those of the torch reference" in " ".join(
        text.split()
    )


def test_verify_wants_a_model_with_an_adapter_and_an_adapter_with_a_model(
    bundle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("verify", bundle, "--adapter", "/none") == 2
    assert "give --model too" in capsys.readouterr().err
    assert call("verify", bundle, "--model", str(tiny.base_folder()), "--max-tokens", "2") == 2
    assert "needs --adapter" in capsys.readouterr().err


def test_verify_names_an_adapter_that_is_not_the_apps(
    bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(tiny.adapter_folder(), tmp_path / "other")
    settings = json.loads((other / "streams.json").read_text())
    settings["streams"]["msa_layers"] = 2
    (other / "streams.json").write_text(json.dumps(settings))
    assert call("verify", bundle, "--model", str(tiny.base_folder()), "--adapter", str(other)) == 2
    said = capsys.readouterr().err
    assert f"--adapter {other}: app 'letters'" in said and "was made from another adapter" in said


def test_any_text_can_be_written_whatever_the_locale(bundle: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "ssdevice", "inspect", bundle]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0 and "─" in done.stdout.decode("utf-8")


def test_verify_runs_without_data(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", bundle, "--max-tokens", "12", "--threads", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == [] and found["equality"]["differences"] == []
    assert found["equality"]["largest_logit_change"] < 1e-4


def test_verify_refuses_another_model(
    bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    other = tmp_path / "other"
    shutil.copytree(tiny.base_folder(), other)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(other)
    assert call("verify", bundle, "--model", str(other), "--max-tokens", "2") == 2
    assert "is not the base of" in capsys.readouterr().err


def test_a_damaged_bundle_is_named_before_anything_runs(
    bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    weights = copy / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    for command in (["verify", str(copy)], ["run", str(copy), "--prompt", "a"]):
        assert call(*command) == 2
        assert "weights.bin is damaged" in capsys.readouterr().err


def test_a_bundle_without_streams_decodes_plainly(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    bundle = str(tiny.tiny_bundle("fp32", streams=False).folder)
    assert call("run", bundle, "--prompt", "hello", "--max-tokens", "5", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["accepted"]) == {1}
    assert call("verify", bundle, "--max-tokens", "5") == 0
    capsys.readouterr()
    assert call("inspect", bundle, "--json") == 0
    assert json.loads(capsys.readouterr().out)["mode"] is None
    assert call("tune", bundle, "--data", str(data)) == 2
    assert "has no streams" in capsys.readouterr().err
