"""Every path that reads a LoRA refuses the options it would ignore, from one list."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ssdevice.adapters.weights import MERGED, PLAIN, AdapterWeights, check_options
from ssdevice.errors import InputError, UnsupportedModelError
from ssdevice.model.lora import attach_lora, check_peft

BASE = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(8, 8))
"""What is read of a base before the options are."""
LINEAR = "base_model.model.model.layers.0.mlp.up_proj"
SET = [
    *((option, True) for option in sorted(MERGED)),
    ("bias", "all"),
    ("bias", "lora_only"),
    *(
        ("init_lora_weights", start)
        for start in ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
    ),
]


def write(folder: Path, **config: Any) -> Path:
    weights = {
        f"{LINEAR}.lora_A.weight": torch.ones(2, 8),
        f"{LINEAR}.lora_B.weight": torch.ones(8, 2),
    }
    save_file(weights, str(folder / "adapter_model.safetensors"))
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(("option", "value"), SET)
def test_what_only_a_merge_takes_into_account_is_refused_apart(
    option: str, value: Any, tmp_path: Path
) -> None:
    folder = write(tmp_path, **{option: value})
    with pytest.raises(
        UnsupportedModelError, match=f"{option}.* does not fit into a slot of a shared base"
    ):
        AdapterWeights.read(folder)  # slots of ONNX and ExecuTorch, and apps added to a bundle
    with pytest.raises(
        UnsupportedModelError, match=f"{option}.* does not fit into a slot of a shared base"
    ):
        attach_lora(BASE, folder)  # functions of Core ML, and what gates compare with
    check_peft(folder)  # merging and training leave it to PEFT


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("layer_replication", [[0, 2]]),
        ("init_lora_weights", "pissa_niter_4"),
        ("use_some_new_thing", True),
    ],
)
def test_what_nobody_takes_into_account_is_refused_on_every_path(
    option: str, value: Any, tmp_path: Path
) -> None:
    folder = write(tmp_path, **{option: value})
    for read in (AdapterWeights.read, check_peft, lambda path: attach_lora(BASE, path)):
        with pytest.raises(InputError, match=option):
            read(folder)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_base_alone_are_taken(start: Any, tmp_path: Path) -> None:
    assert (
        AdapterWeights.read(write(tmp_path, init_lora_weights=start, use_rslora=True)).rank() == 2
    )


def test_every_option_of_the_installed_peft_is_in_the_list() -> None:
    from peft import LoraConfig

    known = {field.name for field in dataclasses.fields(LoraConfig)}
    assert known <= PLAIN | MERGED | {"layer_replication"}
    defaults = {name: value for name, value in LoraConfig(r=2).to_dict().items()}
    check_options(Path("x"), {**defaults, "peft_type": "LORA"}, apart=True)
