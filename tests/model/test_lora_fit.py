"""A LoRA of PEFT is loaded whole: no tensor of its file is left out, and none that the model
expects is made up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from ssdevice.adapters.settings import PEFT_WEIGHTS
from ssdevice.errors import InputError, UnsupportedModelError
from ssdevice.model.lora import attach_lora, merge_lora
from tests.model.tiny import tiny_model

Tensors = dict[str, torch.Tensor]


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def without_a_layer(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if ".layers.1." not in name}


def with_a_layer_more(tensors: Tensors) -> Tensors:
    more = renamed(".layers.1.", ".layers.9.")(tensors)
    return tensors | {name: value.clone() for name, value in more.items()}


def write(folder: Path, **options: Any) -> Any:
    """A random LoRA in a folder; returns PEFT's model."""
    config = LoraConfig(
        **{"r": 2, "target_modules": "all-linear", "init_lora_weights": False, **options}
    )
    wrapped = get_peft_model(tiny_model("llama"), config)
    with torch.no_grad():
        for value in wrapped.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.1)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            renamed("model.model.layers", "model.model.language_model.layers"),
            "language_model.* is unknown, and 41 more",
        ),
        (
            without_a_layer,
            r"model.layers.1.mlp.down_proj.lora_A.weight' is missing, and 13 more",
        ),
        (
            with_a_layer_more,
            r"model.layers.9.mlp.down_proj.lora_A.weight' is unknown, and 13 more",
        ),
    ],
)
@pytest.mark.parametrize("use", [merge_lora, attach_lora])
def test_tensors_that_do_not_fit_the_model_are_refused(
    tmp_path: Path,
    change: Callable[[Tensors], Tensors],
    message: str,
    use: Callable[[Any, Path], Any],
) -> None:
    write(tmp_path)
    file = tmp_path / PEFT_WEIGHTS
    save_file(change(load_file(file)), file)
    with warnings.catch_warnings(), pytest.raises(InputError, match=message):
        warnings.simplefilter("error", UserWarning)  # the error says it all
        use(tiny_model("llama"), tmp_path)


HEAD = {"target_modules": ["lm_head", "v_proj"]}
EMBEDDING = {"target_modules": ["embed_tokens", "v_proj"]}
OPTIONS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": ["up_proj"], "layers_to_transform": [1]},
    {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}, "lora_alpha": 7},
    {"use_rslora": True, "r": 3},
    {"use_dora": True},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"lora_bias": True},
    {"fan_in_fan_out": True},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora"},
    {"target_modules": ["v_proj"], "target_parameters": ["mlp.down_proj.weight"]},
    {"modules_to_save": ["norm"]},
    # The model's embedding and head share their weights.
    HEAD,
    EMBEDDING,
    {"target_modules": ["embed_tokens", "lm_head"]},
    {**HEAD, "use_dora": True},
    {**EMBEDDING, "use_dora": True},
    {**HEAD, "ensure_weight_tying": True},
    {**EMBEDDING, "ensure_weight_tying": True},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    {"trainable_token_indices": [3, 5]},
    {"trainable_token_indices": {"lm_head": [3, 5]}},
]


def logits(model: Any) -> torch.Tensor:
    """Of tokens among which are the trained ones, in float64: only what is merged is rounded."""
    with torch.no_grad():
        found: torch.Tensor = model.double()(torch.tensor([[2, 3, 5, 7, 90, 3]])).logits
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_kind_of_lora_computes_what_peft_computes_without_merging(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    write(tmp_path, **options)
    expected = logits(PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path)).eval())
    assert (expected - logits(tiny_model("llama"))).abs().max() > 0.1
    bound = 3e-5 * expected.abs().max()
    assert (logits(merge_lora(tiny_model("llama"), tmp_path)) - expected).abs().max() < bound
    with suppress(UnsupportedModelError):  # not every kind can stay beside the base
        assert (logits(attach_lora(tiny_model("llama"), tmp_path)) - expected).abs().max() < bound


@pytest.mark.parametrize("options", [*OPTIONS[:2], HEAD], ids=str)
def test_a_plain_lora_of_linears_can_stay_beside_the_base(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    write(tmp_path, **options)
    attach_lora(tiny_model("llama"), tmp_path)


TOKENS = {"trainable_token_indices": [3, 5]}


@pytest.mark.parametrize(
    "options", [{**TOKENS, **HEAD}, {**TOKENS, "modules_to_save": ["lm_head"]}], ids=str
)
def test_layers_that_peft_leaves_unmerged_are_refused(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    write(tmp_path, **options)
    with pytest.raises(
        InputError, match="PEFT does not merge lm_head, which the adapter changes in two ways"
    ):
        merge_lora(tiny_model("llama"), tmp_path)


def test_names_with_peft_s_name_of_the_adapter_are_taken(tmp_path: Path) -> None:
    expected = write(tmp_path).merge_and_unload()
    file = tmp_path / PEFT_WEIGHTS
    save_file(renamed(".weight", ".default.weight")(load_file(file)), file)
    found = merge_lora(tiny_model("llama"), tmp_path)
    assert torch.equal(
        found.model.layers[2].mlp.down_proj.weight, expected.model.layers[2].mlp.down_proj.weight
    )


@pytest.mark.parametrize("name", ["sql-shared", "gsm8k-shared", "e2e-shared"])
def test_shipped_adapters_fit(repository: Path, name: str) -> None:
    from ssdevice.model.loading import load_hf

    merge_lora(
        load_hf(repository / "models" / "base-7m"), repository / "models" / "adapters" / name
    )
