"""A base is loaded whole and as it was trained, or refused by the name of what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssdevice.errors import InputError
from ssdevice.model.loading import load_base, load_hf, resolve_folder
from tests.model.tiny import MODELS, tiny_model

WEIGHTS = "model.safetensors"
Change = Callable[[dict[str, Tensor]], object]


def changed(folder: Path, change: Change, name: str = "llama") -> Path:
    """The tiny model with changed weights."""
    tiny_model(name).save_pretrained(folder)
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def configured(folder: Path, **values: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize("family", ["llama", "arcee"])  # tied, and not
@pytest.mark.parametrize(
    ("value", "kind"),
    [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (-float("inf"), torch.float16)],
)
def test_values_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, value: float, family: str, kind: torch.dtype
) -> None:
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ):

        def put(weights: dict[str, Tensor], name: str = name) -> None:
            weights[name].view(-1)[-1] = value
            weights |= {key: tensor.to(kind) for key, tensor in weights.items()}

        changed(tmp_path, put, family)
        for scratch in (None, tmp_path):
            with pytest.raises(InputError, match=f"{name} has values that are not finite"):
                load_hf(tmp_path, scratch=scratch)


def test_the_largest_values_of_a_type_are_finite(tmp_path: Path) -> None:
    largest = torch.finfo(torch.float32).max
    changed(tmp_path, lambda weights: weights["model.embed_tokens.weight"].fill_(largest))
    load_hf(tmp_path)
    load_hf(tmp_path, scratch=tmp_path)


FINE_GRAINED: Change = lambda w: w.update(  # noqa: E731
    {f"{k}_scale_inv": torch.ones(1, 1) for k in list(w) if "_proj.weight" in k}
)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (FINE_GRAINED, r"model.layers.0.mlp.down_proj.weight_scale_inv and 20 more tensors"),
        (
            lambda w: w.update({"model.layers.2.mlp.up_proj.lora_A.weight": torch.ones(2, 32)}),
            "lora_A.weight",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
            "q_norm.weight and 0 more",
        ),
        (lambda w: w.update({"score.weight": torch.ones(1, 32)}), "score.weight"),
    ],
)
def test_tensors_that_the_model_does_not_read_are_refused(
    tmp_path: Path, change: Change, name: str
) -> None:
    changed(tmp_path, change)
    for values in (True, False):
        with pytest.raises(
            InputError, match=f"the model does not read {'.*' if name[0] != 'm' else ''}{name}"
        ):
            load_base(tmp_path, values=values)


def test_biases_that_the_config_does_not_know_are_refused(tmp_path: Path) -> None:
    configured(changed(tmp_path, lambda w: None), attention_bias=False)
    with pytest.raises(
        InputError, match=r"does not read model.layers.0.self_attn.k_proj.bias and 11 more"
    ):
        load_hf(tmp_path)


def test_tensors_that_no_decoder_of_text_reads_are_notes(tmp_path: Path) -> None:
    tied = load_file(changed(tmp_path, lambda w: None) / WEIGHTS)["model.embed_tokens.weight"]
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(4),
        "model.layers.0.self_attn.masked_bias": torch.tensor(-1e9),
        "model.position_ids": torch.arange(4),
        "mtp.layers.0.mlp.up_proj.weight": torch.ones(4),
        "vision_tower.patch_embed.weight": torch.ones(4),
        "v_head.summary.weight": torch.ones(4),
        "lm_head.weight": tied.clone(),
    }
    changed(tmp_path, lambda w: w.update(harmless))
    for values in (True, False):
        base = load_base(tmp_path, values=values)
        said = "\n".join(base.notes)
        assert len(base.notes) == 4
        for name in (
            "self_attn.masked_bias",
            "mtp.layers.0",
            "vision_tower.patch",
            "v_head.summary",
        ):
            assert name in said and not any(name in key for key in base.parameters)
        assert "inv_freq" not in said  # the library knows it
    expected = tiny_model("llama").state_dict()
    assert all(
        torch.equal(expected[key], value) for key, value in load_hf(tmp_path).state_dict().items()
    )


@pytest.mark.parametrize(
    "kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32]
)
def test_types_of_quantized_weights_are_refused_by_name(tmp_path: Path, kind: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    changed(tmp_path, lambda weights: weights.update({name: weights[name].to(kind)}))
    with pytest.raises(
        InputError,
        match=rf"{name} is stored as [A-Z0-9_]+, as quantized weights are.*the unquantized",
    ):
        load_hf(tmp_path)


METHODS: dict[str, dict[str, Any]] = {
    **{
        name: {"quant_method": name, "bits": 4}
        for name in (
            "gptq",
            "awq",
            "hqq",
            "compressed-tensors",
            "fp8",
            "fbgemm_fp8",
            "mxfp4",
            "torchao",
            "quanto",
            "aqlm",
            "bitnet",
            "auto-round",
            "modelopt",
            "a-method-of-next-year",
        )
    },
    "bitsandbytes": {"load_in_4bit": True},
    "an unnamed method to 4 bits": {"group_size": 64, "bits": 4},
    "an unnamed method": {"mode": "affine"},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_checkpoint_is_refused_by_its_method(tmp_path: Path, method: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    for key, config in (
        ("quantization_config", METHODS[method]),
        ("quantization", METHODS[method]),
        ("text_config", {"quantization_config": METHODS[method]}),
    ):
        configured(tmp_path, **{key: config})
        with pytest.raises(
            InputError,
            match=rf"quantized by {method} \(.*config.json\): .* needs the unquantized model",
        ):
            load_hf(tmp_path)
        configured(tmp_path, **{key: None})
    load_hf(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "an unnamed method to 4 bits"),
        ("quant_config.json", {"w_bit": 4, "zero_point": True}, "an unnamed method to 4 bits"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_files_of_converters_say_it_too(
    tmp_path: Path, file: str, content: object, method: str
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"quantized by {method} \({file}\)"):
        load_hf(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_without_values_every_family_has_the_same_tensors(tmp_path: Path, name: str) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    planned = load_base(tmp_path, values=False)
    loaded = load_base(tmp_path)
    found = {key: value.shape for key, value in planned.hf.state_dict().items()}
    assert found == {key: value.shape for key, value in loaded.hf.state_dict().items()}
    assert all(tensor.is_meta for tensor in planned.hf.parameters())
    assert planned.parameters == loaded.parameters
    assert sum(planned.parameters.values()) == sum(p.numel() for p in loaded.hf.parameters())


def test_of_a_repository_only_what_is_read_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    wanted = {
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.model",
        "a.safetensors",
        "b.safetensors",
    }
    remote = {
        *wanted,
        "consolidated.safetensors",
        "original/model.pth",
        "model.fp16.safetensors",
        "pytorch_model.bin",
    }
    content = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}

    def download(repository: str, allow_patterns: list[str]) -> str:
        for name in huggingface_hub.utils.filter_repo_objects(
            remote, allow_patterns=allow_patterns
        ):
            (tmp_path / name).write_text(json.dumps(content))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("someone/model") == tmp_path
    assert {file.name for file in tmp_path.iterdir()} == wanted
