"""Every export, and verify --model, compare the reference itself with transformers and PEFT."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import NOT_APPLIED
from ssdevice.cli import main
from ssdevice.errors import InputError, ParityError
from ssdevice.export.crosscheck import check as crosscheck
from ssdevice.export.crosscheck.check import SKIPPED, check_export
from ssdevice.export.crosscheck.generation import check_settings
from ssdevice.export.exporter import ExportJob
from ssdevice.export.plan import ExportOptions, Quant, make_plan
from ssdevice.export.target import exporter
from ssdevice.model import loading
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.runtime.session import Session
from tests.export.models import write_base
from tests.once import made_once

Adapters = tuple[tuple[str, Path], ...]
Use = Callable[[Any, Path], Any]


def check(base: Path, out: Path, *adapters: tuple[str, Path], slots: bool = False) -> None:
    options = ExportOptions(
        str(base), "onnx", Quant.FP32, out / "b", adapters, context=96, slots=slots
    )
    job = ExportJob.of(make_plan(options, exporter(options)), lambda *_: None)
    check_export(job)


def dropped(_: Use, hf: Any, __: Path) -> Any:
    return hf


def twice_the_scale(use: Use, hf: Any, adapter: Path) -> Any:
    copied = adapter.parent / f"{adapter.name}-changed"
    shutil.copytree(adapter, copied, dirs_exist_ok=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(
        json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]})
    )
    return use(hf, copied)


def in_the_first_layers_only(use: Use, hf: Any, adapter: Path) -> Any:
    whole = {name: value.clone() for name, value in hf.state_dict().items() if "layers.2." in name}
    used = use(hf, adapter)
    for name, value in whole.items():
        used.get_parameter(
            name.replace(".weight", ".base.weight") if use is loading.attach_lora else name
        ).data = value
    return used


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("adapter", [None, "with_lora", "plain_lora", "lossless"])
def test_right_references_pass(
    base: Path, adapter: str | None, slots: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check(
        base,
        tmp_path,
        *([("app", request.getfixturevalue(adapter))] if adapter else []),
        slots=slots,
    )


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        ("merge_lora", dropped),
        ("merge_lora", twice_the_scale),
        ("merge_lora", in_the_first_layers_only),
        ("attach_lora", dropped),
        ("attach_lora", twice_the_scale),
    ],
)
def test_a_lora_that_is_used_wrongly_is_refused(
    base: Path,
    with_lora: Path,
    plain_lora: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: str,
    fault: Callable[..., Any],
) -> None:
    """In a bundle of several apps, here only in the second one."""
    wrong = shutil.copytree(with_lora, tmp_path / "wrong")
    right: Use = getattr(loading, use)
    slots = use == "attach_lora"

    def used(hf: Any, adapter: Path) -> Any:
        return fault(right, hf, adapter) if adapter == wrong else right(hf, adapter)

    monkeypatch.setattr(loading, use, used)
    apps = [*([("plain", plain_lora)] if slots else []), ("app", wrong)]
    with pytest.raises(ParityError, match=f"^{wrong}: the logits at token .* differ"):
        check(base, tmp_path, *apps, slots=slots)


def test_a_setting_that_nobody_knows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base")
    (base / "generation_config.json").write_text(
        json.dumps({"repetition_penalty": 1.5, "eos_token_id": 1})
    )
    check(base, tmp_path)  # it is known and therefore left out
    monkeypatch.setattr(crosscheck, "unapplied", lambda _: [])
    with pytest.raises(
        ParityError, match="generate.* of transformers gives token .* ssdevice does not know it"
    ):
        check(base, tmp_path)


def test_a_token_that_ends_only_the_answers_of_transformers_is_refused(base: Path) -> None:
    tokenizer = open_tokenizer(base)
    assert check_settings(tokenizer, base, False) == ()
    tokenizer.chat = replace(tokenizer.chat, stop_ids=(9,))
    with pytest.raises(InputError, match=r"token 1 ends answers of generate"):
        check_settings(tokenizer, base, False)


def test_the_second_model_is_gone_afterwards(
    base: Path, plain_lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    load = crosscheck._load

    def noted(*args: Any) -> Any:
        hf = load(*args)
        seen.append(weakref.ref(hf))
        return hf

    monkeypatch.setattr(crosscheck, "_load", noted)
    gc.disable()
    try:
        crosscheck.expected_of(base, [plain_lora, None], [[2, 5, 6, 7], [3, 5, 9]], 96, None)
        assert [one() for one in seen] == [None]
    finally:
        gc.enable()


def test_mapped_weights_and_short_contexts_give_the_same(
    base: Path, with_lora: Path, tmp_path: Path
) -> None:
    prompts = [[2, 5, 6, 7, 11, 12, 3], [3, 5, 9, 2], [3]]
    for adapters in ([None], [with_lora, None]):
        for context in (96, 16):
            mapped, held = (
                crosscheck.expected_of(base, adapters, prompts, context, at)
                for at in (tmp_path, None)
            )
            assert len(mapped) == len(adapters)
            for one, other in zip(chain(*mapped), chain(*held), strict=True):
                assert (one.tokens, one.first, one.chosen) == (
                    other.tokens,
                    other.first,
                    other.chosen,
                )
                assert torch.equal(one.logits, other.logits) and len(one.tokens) <= context


def export(base: Path, out: Path, *flags: str) -> int:
    where = ["--model", str(base), "--out", str(out)]
    return main(
        [
            "export",
            *where,
            "--target",
            "onnx",
            "--quant",
            "fp32",
            "--context",
            "96",
            "--quiet",
            *flags,
        ]
    )


@pytest.fixture(scope="module")
def penalized() -> Path:
    """A bundle of a model whose generation_config.json asks for more than greedy answers."""

    def make(out: Path) -> None:
        base = write_base(out / "base")
        asked = {
            "repetition_penalty": 1.3,
            "num_beams": 2,
            "do_sample": True,
            "top_p": 0.9,
            "eos_token_id": 1,
        }
        (base / "generation_config.json").write_text(json.dumps(asked))
        assert export(base, out / "bundle") == 0

    return made_once("export/penalized", make)


@pytest.mark.wide
def test_settings_that_a_bundle_does_not_apply_are_said_wherever_it_answers(
    penalized: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = str(penalized / "bundle")
    note = (
        f"{NOT_APPLIED}: num_beams=2, repetition_penalty=1.3: generate() of transformers gives "
        "other answers"
    )
    sampling = "generation_config.json asks for sampling (top_p=0.9); the bundle decodes greedily"
    assert Bundle.open(penalized / "bundle").manifest.notes[:2] == (note, sampling)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a b c"}\n')
    for command in (
        ["run", "--prompt", "a b c", "--max-tokens", "3"],
        ["bench", "--data", str(rows), "--limit", "1"],
    ):
        capsys.readouterr()
        assert main([command[0], bundle, *command[1:]]) == 0
        said = capsys.readouterr().err
        assert said.count(f"ssdevice: {note}\n") == 1 and sampling not in said
    assert main(["run", bundle, "--prompt", "a b c", "--max-tokens", "3", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["inspect", bundle, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][:2] == [note, sampling]
    opened = []
    load_base = loading.load_base
    monkeypatch.setattr(
        loading, "load_base", lambda *given, **form: opened.append(0) or load_base(*given, **form)
    )
    assert (
        main(
            [
                "verify",
                bundle,
                "--model",
                str(penalized / "base"),
                "--limit",
                "1",
                "--max-tokens",
                "3",
            ]
        )
        == 0
    )
    assert len(opened) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "prompt ids, logits and first tokens are those of the torch reference" in said
        and note in said
    )


def test_a_host_that_chooses_gives_the_answers_of_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all settings of generation_config.json that it applies; greedily, because generators
    differ.
    """
    base = write_base(tmp_path / "base")
    asked = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 30,
        "suppress_tokens": [9],
        "begin_suppress_tokens": [12],
        "bad_words_ids": [[20], [21, 22], [1]],
        "eos_token_id": 1,
    }
    (base / "generation_config.json").write_text(json.dumps(asked))
    assert export(base, tmp_path / "bundle", "--choose", "host", "--no-cross-check") == 0
    hf = AutoModelForCausalLM.from_pretrained(base)
    with Session.open(tmp_path / "bundle", threads=1) as session:
        ids = session.prompt_ids("a b c b c")
        for _ in session.runs(
            ids, max_tokens=40, mode="plain", sampling=session.sampling(temperature=0)
        ):
            pass
        theirs = hf.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[
            0, len(ids) :
        ].tolist()
        assert session.last.tokens == theirs and len(theirs) > 30
    capsys.readouterr()
    call = ["run", str(tmp_path / "bundle"), "--prompt", "a b c b c", "--max-tokens", "40"]
    assert main([*call, "--json"]) == 0
    said = capsys.readouterr()
    assert (
        json.loads(said.out)["tokens"] != theirs
        and "the model recommends sampling (repetition_pen" in said.err
    )
    assert main([*call, "--json", "--sample", "--temperature", "1e-6", "--no-speculate"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens"] == theirs and not said.err
    assert main(["inspect", str(tmp_path / "bundle"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling"]["repetition_penalty"] == 1.3


@pytest.mark.wide
def test_without_the_comparison_a_bundle_says_so_and_verify_still_makes_it(
    base: Path,
    with_lora: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The fault is in the reference of the parity gate as well, so that only this comparison sees
    it.
    """
    monkeypatch.setattr(loading, "merge_lora", lambda hf, _: hf)
    given = ["--adapter", f"app={with_lora}"]
    assert export(base, tmp_path / "b", *given) == 1
    assert (
        f"{with_lora}: the logits at token" in capsys.readouterr().err
        and not (tmp_path / "b").exists()
    )
    assert export(base, tmp_path / "b", *given, "--no-cross-check") == 0
    assert SKIPPED in json.loads(capsys.readouterr().out)["notes"]
    tokens = ["--limit", "1", "--max-tokens", "3"]
    assert (
        main(
            [
                "verify",
                str(tmp_path / "b"),
                "--model",
                str(base),
                "--adapter",
                str(with_lora),
                *tokens,
            ]
        )
        == 1
    )
    assert f"{with_lora}: the logits at token" in capsys.readouterr().err
