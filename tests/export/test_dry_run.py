"""A dry run refuses what the export refuses: the same line and the same exit code, before any
weight is read.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssdevice.bundle.manifest import LONGER
from ssdevice.cli import main
from ssdevice.config import Mode
from ssdevice.errors import ConfigError, InputError
from ssdevice.export import stages
from ssdevice.model.loading import load_hf
from tests.export.models import write_adapter, write_lora
from tests.model.tiny import tiny_model

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123\n"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Spoil = Callable[[Path], object]


def json_changed(name: str, **values: object) -> Spoil:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def weights_changed(change: Callable[[dict[str, Tensor]], object], name: str = WEIGHTS) -> Spoil:
    def rewrite(folder: Path) -> None:
        weights = load_file(folder / name)
        change(weights)
        save_file(weights, folder / name, metadata={"format": "pt"})

    return rewrite


def written(name: str, content: str) -> Spoil:
    return lambda folder: (folder / name).write_text(content)


def removed(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def in_shards(folder: Path) -> None:
    """A checkpoint of two files, of which the download brought only one."""
    weights = load_file(folder / WEIGHTS)
    names = sorted(weights)
    places = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    first = min(places.values())
    save_file(
        {n: weights[n] for n in names if places[n] == first},
        folder / first,
        metadata={"format": "pt"},
    )
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / WEIGHTS).unlink()


def another_model(name: str) -> Spoil:
    """The weights and config of another family, beside the tokenizer."""
    return lambda folder: tiny_model(name).save_pretrained(folder)


def one_word_more(folder: Path) -> None:
    """A tokenizer with an id for which the model has no embedding."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["<unk>"] = 300
    file.write_text(json.dumps(content))


def renamed(old: str, new: str) -> Spoil:
    return lambda folder: (folder / old).rename(folder / new)


def prefixed(weights: dict[str, torch.Tensor], prefix: str) -> None:
    for name in list(weights):
        weights[prefix + name] = weights.pop(name)


QUANTIZED = {"quant_method": "gptq", "bits": 4}
TEMPLATE = "chat_template.jinja"
EACH = "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
BASES: dict[str, tuple[Spoil, tuple[str, ...], str]] = {
    "no config": (removed("config.json"), (), "no config.json"),
    "no tokenizer": (removed("tokenizer.json"), (), "no tokenizer.json"),
    "a pointer as tokenizer": (
        written("tokenizer.json", POINTER),
        (),
        "tokenizer.json is a Git LFS pointer",
    ),
    "a damaged tokenizer": (written("tokenizer.json", "{"), (), "not a tokenizer"),
    "no stop token": (
        lambda folder: (
            written("tokenizer_config.json", "{}")(folder),
            json_changed("config.json", eos_token_id=None)(folder),
            removed("generation_config.json")(folder),
            written(TEMPLATE, "{% for m in messages %}{{ m['content'] }}{% endfor %}")(folder),
        ),
        (),
        "no stop token",
    ),
    "a template that refuses": (
        written(TEMPLATE, "{{ raise_exception('no') }}"),
        (),
        "chat template",
    ),
    "a token without an embedding": (one_word_more, (), "with id 300, the model has 300 tokens"),
    "no weights": (removed(WEIGHTS), (), "no .safetensors weights"),
    "a variant": (
        renamed(WEIGHTS, "model.fp16.safetensors"),
        (),
        "from_pretrained(MODEL, variant='fp16').save_pretrained(FOLDER)",
    ),
    "pickled weights": (
        renamed(WEIGHTS, "pytorch_model.bin"),
        (),
        "pytorch_model.bin is not what transformers loads",
    ),
    "a pointer as weights": (
        written(WEIGHTS, POINTER),
        (),
        "model.safetensors is a Git LFS pointer",
    ),
    "weights cut short": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-8]),
        (),
        "no whole safet",
    ),
    "a file of a terabyte": (
        lambda f: os.truncate(f / WEIGHTS, 1 << 40),
        (),
        "no whole safetensors file",
    ),  # sparse
    "a missing shard": (in_shards, (), "model-00002-of-00002.safetensors: no such file"),
    "a missing tensor": (
        weights_changed(lambda w: w.pop("model.norm.weight")),
        (),
        "lack model.norm.weight",
    ),
    "weights of a wrapper": (
        weights_changed(lambda w: prefixed(w, "module.")),
        (),
        "a wrapper, which put 'module.' before all names",
    ),
    "a compiled model's weights": (
        weights_changed(lambda w: prefixed(w, "_orig_mod.")),
        (),
        "put '_orig_mod.' before",
    ),
    "flags in a list of special tokens": (
        lambda folder: (
            written("tokenizer_config.json", "{}")(folder),
            written(
                "special_tokens_map.json", '{"additional_special_tokens": [{"content": "<x>"}]}'
            )(folder),
        ),
        (),
        "special_tokens_map.json: 'additional_special_tokens' has tables of flags, which",
    ),
    "an unread tensor": (
        weights_changed(lambda w: w.update(scale=torch.ones(1))),
        (),
        "does not read scale",
    ),
    "another shape": (json_changed("config.json", intermediate_size=80), (), "by config.json"),
    "fewer layers": (
        json_changed("config.json", num_hidden_layers=2),
        (),
        "config.json only 2 layers",
    ),
    "quantized": (
        json_changed("config.json", quantization_config=QUANTIZED),
        (),
        "quantized by gptq",
    ),
    "8-bit types": (
        weights_changed(
            lambda w: w.update(
                {"model.norm.weight": w["model.norm.weight"].to(torch.float8_e4m3fn)}
            )
        ),
        (),
        "model.norm.weight is stored as F8_E4M3",
    ),
    "another family": (
        json_changed("config.json", model_type="mixtral", num_local_experts=8),
        (),
        "of experts",
    ),
    "a context beyond the rope": (
        json_changed(
            "config.json",
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        ("--context", "300"),
        "at most 256, not 300",
    ),
    "a context beyond the positions": (
        another_model("opt-before"),
        ("--context", "300"),
        "the model's 256 positions",
    ),
    "a template beyond the context": (
        written(TEMPLATE, f"{'a ' * 96}{EACH}"),
        (),
        "leaves no room",
    ),
    "generation settings that transformers refuses": (
        written("generation_config.json", '{"eos_token_id": 1, "num_return_sequences": 2}'),
        (),
        "transformers cannot read",
    ),
    "no object in config": (
        written("config.json", "[]"),
        (),
        "config.json: expected a JSON object, found list",
    ),
    "a list as quantization": (
        json_changed("config.json", quantization_config=[]),
        (),
        "'quantization_config' is not",
    ),
    "a text as a part": (
        json_changed("config.json", text_config="x"),
        (),
        "'text_config' is not an object",
    ),
    "no list of layers": (
        json_changed("config.json", layer_types=3),
        (),
        "config.json: transformers cannot read it",
    ),
    "a type of weights that is a list": (
        json_changed("config.json", dtype=[]),
        (),
        "config.json: transformers cannot",
    ),
    "layers without an end": (
        json_changed("config.json", num_hidden_layers=10**12),
        (),
        "expected 1 to 1024",
    ),
    "heads without an end": (
        json_changed("config.json", head_dim=10**12),
        (),
        "head_dim is 1000000000000, expected 1",
    ),
    "no heads": (json_changed("config.json", num_attention_heads=0), (), "config.json: "),
    "no rows to calibrate with": (
        lambda _: None,
        ("--quant", "int4", "--calibrate", "absent.jsonl"),
        "absent.jsonl",
    ),
}


@pytest.mark.parametrize("case", BASES)
def test_a_base_is_refused_by_both(
    base: Path,
    tmp_path: Path,
    case: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil, flags, said = BASES[case]
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    spoil(folder)
    _refused_by_both(folder, tmp_path, flags, said, capsys, monkeypatch)


def test_what_a_dry_run_approves_goes_as_far_as_the_weights(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for values in ({}, {"rope_parameters": rope}):
        json_changed("config.json", **values)(
            base_of := shutil.copytree(base, tmp_path / f"base{len(values)}")
        )
        with pytest.raises(AssertionError, match="0"):
            _refused_by_both(base_of, tmp_path, (), "", capsys, monkeypatch)


STREAMS = "streams.safetensors"
LORA = "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ADAPTERS: dict[str, tuple[Spoil, str]] = {
    "no streams": (removed(STREAMS), "streams.safetensors: no such file"),
    "a pointer as streams": (written(STREAMS, POINTER), "streams.safetensors is a Git LFS pointer"),
    "streams of another size": (
        weights_changed(lambda w: w.update(identifiers=torch.ones(3, 5)), STREAMS),
        "expected",
    ),
    "streams that are not finite": (
        weights_changed(lambda w: w["identifiers"].fill_(torch.nan), STREAMS),
        "finite",
    ),
    "streams of 8 bits": (
        weights_changed(
            lambda w: w.update(identifiers=w["identifiers"].to(torch.float8_e4m3fn)), STREAMS
        ),
        "tensor 'identifiers' is float8_e4m3fn, as quantized weights are",
    ),
    "an instruction beyond the context": (
        json_changed("streams.json", instruction="a " * 97),
        "leaves no room",
    ),
    "a long instruction": (
        json_changed("streams.json", instruction="a " * 93),
        "the instruction of app 'app'",
    ),
    "a LoRA of another method": (
        json_changed("adapter_config.json", peft_type="LOHA"),
        "expected 'LORA'",
    ),
    "a pointer as LoRA": (written(LORA, POINTER), "adapter_model.safetensors is a Git LFS pointer"),
    "a LoRA that is not finite": (weights_changed(lambda w: w[Q].fill_(torch.inf), LORA), "finite"),
    "a LoRA of 8 bits": (
        weights_changed(lambda w: w.update({Q: w[Q].to(torch.float8_e5m2)}), LORA),
        f"tensor {Q!r} is float8_e5m2, as",
    ),
    "a LoRA of integers": (
        weights_changed(lambda w: w.update({Q: w[Q].to(torch.int8)}), LORA),
        f"{Q!r} is int8, as",
    ),
    "a LoRA of a wrapper": (
        weights_changed(lambda w: prefixed(w, "module."), LORA),
        "which put 'module.' before all",
    ),
    "a LoRA of another model": (
        weights_changed(lambda w: w.update({Q.replace("q", "x"): w.pop(Q)}), LORA),
        "unknown",
    ),
    "a LoRA of another size": (
        weights_changed(lambda w: w.update({Q: torch.ones(6, 5)}), LORA),
        "size mismatch for",
    ),
    "a LoRA of a resized vocabulary": (
        weights_changed(
            lambda w: w.update({"base_model.model.lm_head.weight": torch.ones(304, 128)}), LORA
        ),
        "vocabulary of 304 tokens, the model has 300",
    ),
}


APART = ("no streams", "a long instruction", "a LoRA of another model", "a LoRA of another size")


@pytest.mark.parametrize(
    ("case", "flags"), [*((case, ()) for case in ADAPTERS), *((c, ("--slots",)) for c in APART)]
)
def test_an_adapter_is_refused_by_both(
    base: Path,
    with_lora: Path,
    tmp_path: Path,
    case: str,
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil, said = ADAPTERS[case]
    adapter = tmp_path / "adapter"
    shutil.copytree(with_lora, adapter)
    spoil(adapter)
    _refused_by_both(
        base, tmp_path, ("--adapter", f"app={adapter}", *flags), said, capsys, monkeypatch
    )


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_lora_for_which_there_are_no_slots_is_refused_by_both(
    base: Path,
    tmp_path: Path,
    module: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = tmp_path / "adapter"
    wrapped = get_peft_model(load_hf(base), LoraConfig(r=2, target_modules=[module, "q_proj"]))
    wrapped.save_pretrained(adapter, save_embedding_layers=False)
    given = ("--adapter", f"app={adapter}", "--slots")
    _refused_by_both(base, tmp_path, given, "slots are for linears", capsys, monkeypatch)


SHARED: dict[str, tuple[dict[str, int], str]] = {
    "a draft vocabulary": ({"draft_vocabulary": 64}, "streams that choose among 64 tokens cannot"),
    "a draft vocabulary over a LoRA": (
        {"draft_vocabulary": 64, "lora": 3},
        "lossless streams over a LoRA cannot share",
    ),
    "drafts that follow": ({"follow_rank": 4}, "streams whose drafts follow each other"),
    "layers of its own": (
        {"msa_layers": 0, "adapter_rank": 0, "draft_layers": 1},
        "streams of draft layers cannot share",
    ),
    "a LoRA below": ({"lora": 3}, "lossless streams over a LoRA cannot share"),
}
"""Adapters that fit only into a bundle of their own: what is special, and what is said."""


TARGETS = [
    *((case, target) for case in SHARED for target in ("onnx", "executorch")),
    ("layers of its own", "coreml"),  # whose apps are functions, of their own graphs but one cache
    ("a LoRA below", "coreml"),
]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("case", "target"), TARGETS)
def test_an_adapter_that_cannot_share_a_bundle_is_refused_by_both(
    base: Path,
    lossless: Path,
    tmp_path: Path,
    case: str,
    beside: bool,
    target: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options, said = SHARED[case]
    streams = {name: value for name, value in options.items() if name != "lora"}
    adapter = write_adapter(tmp_path / "adapter", base, Mode.LOSSLESS, **streams)
    if "lora" in options:
        write_lora(adapter, base, rank=options["lora"])
    others = ("--adapter", f"other={lossless}") if beside else ("--slots",)
    quant = "fp16" if target == "coreml" else "fp32"
    given = ("--adapter", f"app={adapter}", *others, "--target", target, "--quant", quant)
    _refused_by_both(base, tmp_path, given, said, capsys, monkeypatch)


def test_rows_that_the_template_refuses_are_refused_by_both(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    written(TEMPLATE, refusing + EACH)(folder)
    rows = tmp_path / "rows.jsonl"
    roles = ("system", "user", "assistant")
    messages = [{"role": role, "content": "a b"} for role in roles]
    rows.write_text(json.dumps({"messages": messages}))
    given = ("--quant", "int4", "--calibrate", str(rows))
    said = "the chat template takes no system message"
    _refused_by_both(folder, tmp_path, given, said, capsys, monkeypatch)


def test_a_tokenizer_that_transformers_reads_otherwise_is_refused_by_both(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise InputError("the tokenizer differs from that of transformers")

    monkeypatch.setattr("ssdevice.export.crosscheck.prompts.compare_prompts", wrong)
    _refused_by_both(base, tmp_path, (), "differs from that of transformers", capsys, monkeypatch)
    with pytest.raises(AssertionError, match="0"):
        _refused_by_both(base, tmp_path, ("--no-cross-check",), "", capsys, monkeypatch)


def test_more_than_a_manifest_holds_is_refused_by_both(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as 257 apps; which rules there are is for the tests of the manifest."""

    def refuse(**given: object) -> None:
        assert len(given) > 15
        raise ConfigError("apps has 257 entries, expected 1 to 256")

    monkeypatch.setattr("ssdevice.export.manifest.Manifest", refuse)
    said = "no bundle can hold this: apps has 257 entries, expected 1 to 256"
    _refused_by_both(base, tmp_path, (), said, capsys, monkeypatch)


def test_a_name_that_is_too_long_for_functions_is_refused_by_both(
    base: Path,
    plain_lora: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("coremltools")
    name = "a" * 60
    given = ("--adapter", f"{name}={plain_lora}", "--slots", "--quant", "fp16")
    said = f"--adapter {name}=: the name of its function has 68 characters, at most 64"
    _refused_by_both(base, tmp_path, (*given, "--target", "coreml"), said, capsys, monkeypatch)


KNOWN_LATER = {
    "coreml/logits.py": "an exported graph is read",
    "executorch/lowering.py": "the model's layers are traced",
    "onnx/exporter.py": "the model's layers are traced",
    "onnx/graphs.py": "an exported graph is read",
    "onnx/tracing.py": "the model's layers are traced",
}
"""Files of the export that refuse input which no plan can know, and when."""
KNOWN_BEFORE = {
    "crosscheck/generation.py",
    "crosscheck/prompts.py",
    "executorch/slots.py",
    "executorch/target.py",
    "exporter.py",
    "manifest.py",
    "mlprogram/options.py",
    "phrases.py",
    "plan.py",
    "target.py",
    "variants.py",
}
"""Files whose refusals the plan raises, or the options before it."""


def test_every_refusal_of_an_export_is_known_before_or_named() -> None:
    """A new refusal has to be called by ``plan._check_plan``; then add its file here."""
    root = Path(stages.__file__).parent
    kinds = ("InputError", "ConfigError", "UnsupportedModelError", "BundleError")
    found = set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            raised = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(raised, ast.Call) and getattr(raised.func, "id", "") in kinds:
                found.add(file.relative_to(root).as_posix())
    assert found - KNOWN_BEFORE - {*KNOWN_LATER} == set()
    assert (KNOWN_BEFORE | {*KNOWN_LATER}) - found == set()


def _refused_by_both(
    base: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Assert one line and code 2 from the dry run, and the same from an export, which never begins
    to load.
    """

    def begin(*_: object) -> None:
        raise AssertionError("the export began")

    monkeypatch.setattr(stages.Whole, "begin", begin)
    monkeypatch.setattr("ssdevice.model.loading._tensors", begin)
    command = [
        "export",
        "--model",
        str(base),
        "--target",
        "onnx",
        "--context",
        "96",
        "--out",
        str(tmp_path / "b"),
        *flags,
    ]
    capsys.readouterr()  # what making the adapters said
    lines = []
    for mode in (["--dry-run"], []):
        code = main([*command, *mode])
        lines.append(capsys.readouterr().err)
        assert code == 2, (code, lines)
    assert lines[0] == lines[1]
    assert said in lines[0] and lines[0].count("\n") == 1


def test_tensors_that_are_left_out_are_said(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    weights_changed(lambda w: w.update({"mtp.norm.weight": torch.ones(4)}))(folder)
    (note,) = _notes(folder, "96", capsys)
    assert note == (
        "not read from the weights: layers that predict further tokens (mtp.norm.weight and 0 more "
        "tensors)"
    )


def test_an_end_that_the_model_cannot_write_is_said(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    json_changed("generation_config.json", eos_token_id=[1, 300])(folder)
    assert _notes(folder, "96", capsys) == [
        "token 300 never ends an answer: the model has 300 tokens"
    ]


def test_a_context_that_the_model_was_not_made_for_is_said(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """256 positions of a rotary embedding can be followed by others; no token shows that the model
    never saw them.
    """
    assert _notes(base, "256", capsys) == []
    assert _notes(base, "257", capsys) == [f"{LONGER}: 257 tokens, 256 positions"]


def _notes(folder: Path, context: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Of a dry run."""
    given = [
        "--model",
        str(folder),
        "--target",
        "onnx",
        "--context",
        context,
        "--out",
        str(folder / "b"),
        "--dry-run",
    ]
    assert main(["export", *given]) == 0
    notes: list[str] = json.loads(capsys.readouterr().out)["notes"]
    return notes
