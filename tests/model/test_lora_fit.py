"""A LoRA of PEFT is loaded whole: no tensor of its file is left out, and none that the model expects is made up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from ssdevice.adapters.settings import PEFT_WEIGHTS
from ssdevice.errors import InputError
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
    config = LoraConfig(**{"r": 2, "target_modules": "all-linear", "init_lora_weights": False, **options})
    wrapped = get_peft_model(tiny_model("llama"), config)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            renamed("model.model.layers", "model.model.language_model.layers"),
            "language_model.* is unknown, and 41 more",
        ),
        (without_a_layer, r"'base_model.model.model.layers.1.mlp.down_proj.lora_A.weight' is missing, and 13 more"),
        (with_a_layer_more, r"'base_model.model.model.layers.9.mlp.down_proj.lora_A.weight' is unknown, and 13 more"),
    ],
)
@pytest.mark.parametrize("use", [merge_lora, attach_lora])
def test_tensors_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, change: Callable[[Tensors], Tensors], message: str, use: Callable[[Any, Path], Any]
) -> None:
    write(tmp_path)
    file = tmp_path / PEFT_WEIGHTS
    save_file(change(load_file(file)), file)
    with warnings.catch_warnings(), pytest.raises(InputError, match=message):
        warnings.simplefilter("error", UserWarning)  # the error says it all
        use(tiny_model("llama"), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["up_proj"], "layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 3}},
        {"use_dora": True},
        {"bias": "all"},
        {"target_modules": ["embed_tokens", "v_proj"]},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3, 5]},
        {"init_lora_weights": "pissa"},
    ],
)
def test_every_kind_of_lora_that_peft_saves_is_merged(tmp_path: Path, options: dict[str, Any]) -> None:
    wrapped = write(tmp_path, **options)
    found = merge_lora(tiny_model("llama"), tmp_path).state_dict()
    for name, value in wrapped.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_names_with_peft_s_name_of_the_adapter_are_taken(tmp_path: Path) -> None:
    expected = write(tmp_path).merge_and_unload()
    file = tmp_path / PEFT_WEIGHTS
    save_file(renamed(".weight", ".default.weight")(load_file(file)), file)
    found = merge_lora(tiny_model("llama"), tmp_path)
    assert torch.equal(found.model.layers[2].mlp.down_proj.weight, expected.model.layers[2].mlp.down_proj.weight)


@pytest.mark.parametrize("name", ["sql-shared", "gsm8k-shared", "e2e-shared"])
def test_shipped_adapters_fit(repository: Path, name: str) -> None:
    from ssdevice.model.loading import load_hf

    merge_lora(load_hf(repository / "models" / "base-7m"), repository / "models" / "adapters" / name)
