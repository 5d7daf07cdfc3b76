"""A training run: it learns, it goes on after kill -9 as if nothing had happened, and it refuses
wrong input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssdevice.adapters.settings import PEFT_WEIGHTS
from ssdevice.bench.against_torch import main_logits
from ssdevice.cli import main
from ssdevice.data import Example
from ssdevice.model.loading import load
from ssdevice.model.tokenizer import open_tokenizer, tokenizer_folder
from ssdevice.text.tokenizer import ChatTokenizer, Sample
from ssdevice.train import samples
from ssdevice.train.batches import BatchOrder, tokenize


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a word tokenizer and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    words = ["<pad>", "<end>", "<user>", "<assistant>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "pad_token": "<pad>"})
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose completion counts on from the prompt's letter: easy to learn, also four ahead."""
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    rows = []
    for i in range(26):
        following = [alphabet[(i + distance) % 26] for distance in range(1, 9)]
        rows.append({"prompt": alphabet[i], "completion": " ".join(following)})
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def command(base: Path, data: Path, out: Path, *extra: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ssdevice",
        "train",
        "--model",
        str(base),
        "--data",
        str(data),
        "--app",
        "abc",
        "--out",
        str(out),
        *(() if "next-token" in extra else ("--msa-layers", "2")),
        "--batch-size",
        "8",
        "--lr",
        "1e-2",
        "--precision",
        "fp32",
        "--threads",
        "1",
        *extra,
    ]


def test_order_of_batches_is_fixed_by_seed_and_position() -> None:
    samples = [Sample(tuple(range(n + 2)), 1) for n in range(23)]
    order = BatchOrder(samples, 4, seed=5)
    whole = order.from_position(0)
    first = [next(whole) for _ in range(15)]
    resumed = BatchOrder(samples, 4, seed=5).from_position(9)
    assert [next(resumed) for _ in first[9:]] == first[9:]
    lengths = sorted(len(s.ids) for group in first[:6] for s in group)
    assert lengths == sorted(len(s.ids) for s in samples), "an epoch shows every sample once"


def test_a_system_message_is_part_of_the_prompt(base: Path) -> None:
    """As in run, bench and verify: what is trained is what is asked later."""
    tokenizer = open_tokenizer(base)
    samples, _ = tokenize([Example("b", "c", system="a")], tokenizer, "", 64)
    assert list(samples[0].ids[: samples[0].prompt]) == tokenizer.prompt_ids("b", system="a")
    assert samples[0].ids[: samples[0].prompt] != tuple(tokenizer.prompt_ids("b"))


def test_training_learns_to_draft(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(base, data, tmp_path / "abc", "--steps", "200", "--dev", str(data))
    assert main(arguments[3:]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_per_step"]["chain:4"] > 2.5, (
        "plain decoding is 1.0, untrained streams 1.0 to 1.1"
    )
    names = {p.name for p in (tmp_path / "abc").iterdir()}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "streams.json",
        "streams.safetensors",
    }
    lora = json.loads((tmp_path / "abc" / "adapter_config.json").read_text("utf-8"))
    assert lora["base_model_name_or_path"] == base.name  # not where it lies on this machine
    assert len({p.stat().st_mode for p in (tmp_path / "abc").iterdir()}) == 1, (
        "who reads one file reads all"
    )


@pytest.mark.wide
def test_killed_run_goes_on_to_the_same_weights(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--steps", "60", "--mode", "lossless")
    assert main(command(base, data, tmp_path / "whole", *options)[3:]) == 0
    out = tmp_path / "killed"
    saving = (
        "from ssdevice import cli; from ssdevice.train import optimization; "
        "optimization.CHECKPOINT_SECONDS = 0.0"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{saving}; cli.main()", *command(base, data, out, *options)[3:]],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (out / ".training" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)
    assert main(command(base, data, out, *options)[3:]) == 2
    assert "another process is training" in capsys.readouterr().err
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (out / ".training" / "checkpoint.pt").exists() and not (out / "streams.json").exists()
    assert main(command(base, data, out, *options, "--seed", "1")[3:]) == 2
    assert "unfinished run with other options" in capsys.readouterr().err
    assert main(command(base, data, out, *options)[3:]) == 0
    expected, found = (
        load_file(tmp_path / name / "streams.safetensors") for name in ("whole", "killed")
    )
    for name, value in expected.items():
        rounding = (
            2.0**-10 if value.dtype == torch.float16 else 1e-5
        )  # a last bit may fall on the other side
        torch.testing.assert_close(found[name], value, rtol=rounding, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--msa-layers", "3"], "N_s = 3"),
        (["--model", "/nonexistent"], "no such folder"),
        (["--data", "/nonexistent.jsonl"], "nonexistent"),
        (["--gamma", "0"], "gamma is 0"),
        (["--max-length", "3"], "raise --max-length"),
        (["--app", "a b"], "--app"),
        (["--draft-vocabulary", "100"], "the model has 31 tokens"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    base: Path,
    data: Path,
    tmp_path: Path,
    change: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*command(base, data, tmp_path / "x", "--steps", "1")[3:], *change]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ssdevice: error:") and message in last
    assert not (tmp_path / "x").exists()


def test_an_existing_folder_is_not_overwritten(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(command(base, data, tmp_path, "--steps", "1")[3:]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.wide
def test_training_goes_on_from_an_adapter_on_its_own_completions(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """A LoRA made by PEFT gets streams; what it says itself is what they learn, so little of its
    answers changes.
    """
    first = command(base, data, tmp_path / "lora", "--steps", "80", "--objective", "next-token")
    assert main(first[3:]) == 0
    more = ("--init", str(tmp_path / "lora"), "--self-distill", "--steps", "20", "--lr", "1e-3")
    assert main(command(base, data, tmp_path / "streams", *more)[3:]) == 0
    before, after = (
        load_file(tmp_path / n / "adapter_model.safetensors") for n in ("lora", "streams")
    )
    assert before.keys() == after.keys()
    drift = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert 0 < drift < 0.5, "it went on from there"
    distilled = json.loads((tmp_path / "streams" / "streams.json").read_text())["training"]
    assert distilled["self_distill"] and distilled["final_loss"][0] < 0.2, (
        "its own words are no news to it"
    )


@pytest.mark.wide
def test_lossless_streams_over_a_lora_keep_its_answers(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """The adapter holds the LoRA as it was; main rows compute the tuned model, with the streams or
    without.
    """
    tuned = tmp_path / "lora"
    both = tmp_path / "both"
    assert main(command(base, data, tuned, "--steps", "40", "--objective", "next-token")[3:]) == 0
    more = ("--init", str(tuned), "--mode", "lossless", "--self-distill", "--steps", "300")
    assert main(command(base, data, both, *more)[3:]) == 0
    assert (both / PEFT_WEIGHTS).read_bytes() == (tuned / PEFT_WEIGHTS).read_bytes()
    losses = json.loads((both / "streams.json").read_text())["training"]["final_loss"]
    assert losses[0] == 0 and losses[1] < 1, (
        "only streams were trained, on what the tuned model says"
    )
    alone, lossless = (load(base, folder, 32).model for folder in (tuned, both))
    assert torch.equal(main_logits(alone, [2, 5, 1, 3]), main_logits(lossless, [2, 5, 1, 3]))


def test_an_adapter_keeps_its_tokenizer_when_streams_are_added(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """What its LoRA was trained with is what the streams are trained with, and what an export
    finds.
    """
    tuned = tmp_path / "lora"
    both = tmp_path / "both"
    assert main(command(base, data, tuned, "--steps", "1", "--objective", "next-token")[3:]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tuned / name).write_bytes((base / name).read_bytes())
    template = (
        (base / "chat_template.jinja").read_text().replace("'<' + m['role'] + '>'", "'<user>a'")
    )
    (tuned / "chat_template.jinja").write_text(template)
    seen: list[list[int]] = []

    def tokenized(examples: Any, tokenizer: ChatTokenizer, *rest: Any) -> Any:
        seen.append(tokenizer.prompt_ids("b"))
        return tokenize(examples, tokenizer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "tokenize", tokenized)
        assert (
            main(
                command(
                    base, data, both, "--init", str(tuned), "--mode", "lossless", "--steps", "1"
                )[3:]
            )
            == 0
        )
    assert seen == [open_tokenizer(tuned).prompt_ids("b")] != [open_tokenizer(base).prompt_ids("b")]
    assert tokenizer_folder(base, both) == both
    assert open_tokenizer(base, both).prompt_ids("b") == seen[0]


@pytest.mark.wide
def test_trained_streams_can_learn_to_see_more_tokens(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """The terms begin as zero, so they draft as before until these are trained; then they help."""
    common = ("--mode", "lossless", "--adapter-rank", "2", "--token-rank", "0")
    assert main(command(base, data, tmp_path / "one", "--steps", "40", *common)[3:]) == 0
    losses = []
    for name, extra in (("without", ()), ("with", ("--token-rank", "4", "--follow-rank", "3"))):
        more = ("--init", str(tmp_path / "one"), "--mode", "lossless", "--steps", "60", *extra)
        assert main(command(base, data, tmp_path / name, *more)[3:]) == 0
        losses.append(
            json.loads((tmp_path / name / "streams.json").read_text())["training"]["final_loss"][1]
        )
    assert {"token.up.weight", "follow.up.weight"} < load_file(
        tmp_path / "with" / "streams.safetensors"
    ).keys()
    assert losses[1] < losses[0]


def test_streams_can_learn_while_the_answers_stay(base: Path, data: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert main(command(base, data, one, "--steps", "40")[3:]) == 0
    more = (
        "--init",
        str(one),
        "--freeze-lora",
        "--follow-rank",
        "3",
        "--self-distill",
        "--steps",
        "60",
    )
    assert main(command(base, data, two, *more)[3:]) == 0
    assert (two / PEFT_WEIGHTS).read_bytes() == (one / PEFT_WEIGHTS).read_bytes()
    before, after = (load_file(folder / "streams.safetensors") for folder in (one, two))
    assert (
        not torch.equal(before["identifiers"], after["identifiers"])
        and after["follow.up.weight"].abs().sum() > 0
    )
    assert json.loads((two / "streams.json").read_text())["training"]["final_loss"][0] == 0, (
        "main rows ran once"
    )


def test_a_damaged_checkpoint_is_refused(
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wherever a byte is another: also in the weights, where torch would read it in silence."""
    again = command(base, data, tmp_path / "x", "--steps", "2", "--quiet")[3:]
    with monkeypatch.context() as patched:
        patched.setattr(
            "ssdevice.train.trainer._save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        assert main(again) == 130
    file = tmp_path / "x" / ".training" / "checkpoint.pt"
    whole = file.read_bytes()
    for content in (
        *(
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
            for at in (0, 999, len(whole) // 2)
        ),
        b"",
    ):
        file.write_bytes(content)
        capsys.readouterr()
        assert main(again) == 2
        said = capsys.readouterr().err
        assert (
            said.count("\n") == 1
            and f"{file} is damaged; delete {file.parent} to start over" in said
        )
    file.write_bytes(whole)
    (file.parent / "run").write_bytes(b"\xff")
    assert main(again) == 2 and "unfinished run with other options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "--objective next-token --gamma 2",
            "--gamma has no effect: next-token training has no streams",
        ),
        (
            "--objective next-token --soft-labels 0.5",
            "--soft-labels has no effect: next-token training has no streams",
        ),
        ("--mode lossless --lora-rank 4", "--lora-rank has no effect: in lossless mode"),
        (
            "--adapter-rank 4",
            "--adapter-rank has no effect: streams have adapters in lossless mode",
        ),
        ("--stream-mlp adapter", "--stream-mlp has no effect"),
        (
            "--answer-tokens 5",
            "--answer-tokens has no effect: it goes with --self-distill or --self-prompt",
        ),
    ],
)
def test_an_option_without_an_effect_is_refused(
    base: Path,
    data: Path,
    tmp_path: Path,
    given: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(base, data, tmp_path / "x", *given.split())[3:]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--msa-layers", "1"], "with --msa-layers 2, not 1"),
        (["--mode", "lossless", "--freeze-lora"], "--freeze-lora is for streams in shared mode"),
        (["--mode", "lossless"], "with --mode shared, not lossless"),
    ],
)
def test_an_adapter_to_go_on_from_must_fit(
    base: Path,
    data: Path,
    tmp_path: Path,
    extra: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(base, data, tmp_path / "one", "--steps", "1")[3:]) == 0
    again = command(
        base, data, tmp_path / "two", "--init", str(tmp_path / "one"), "--steps", "1", *extra
    )
    assert main(again[3:]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "error", "code", "message", "kept"),
    [
        ("trainer.read_samples", KeyboardInterrupt(), 130, "ssdevice: interrupted", False),
        ("trainer._choose_vocabulary", MemoryError(), 1, "out of memory", False),
        ("optimization._backward", KeyboardInterrupt(), 130, "ssdevice: interrupted", False),
        ("trainer._save", KeyboardInterrupt(), 130, "the same command goes on", True),
        ("trainer.evaluate", KeyboardInterrupt(), 130, "the same command goes on", True),
        (
            "checkpoint.os.fsync",
            OSError(28, "No space left on device"),
            1,
            "the disk is full",
            False,
        ),
        (
            "trainer.write_streams",
            RuntimeError("I/O error: No space left on device"),
            1,
            "the disk is full",
            True,
        ),
    ],
)
def test_a_failure_is_a_line_and_the_same_command_goes_on(
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    error: BaseException,
    code: int,
    message: str,
    kept: bool,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    again = command(
        base,
        data,
        tmp_path / "x",
        "--steps",
        "2",
        "--dev",
        str(data),
        "--quiet",
        "--max-length",
        "24",
    )
    with monkeypatch.context() as patched:
        patched.setattr(f"ssdevice.train.{place}", fail)
        assert main(again[3:]) == code
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert not any(name.endswith(".tmp") for name in left)
    assert (tmp_path / "x").exists() == kept
    if kept:
        assert main(again[3:]) == 0
        assert not (tmp_path / "x" / ".training").exists()
