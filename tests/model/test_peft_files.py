"""PEFT's files are checked before PEFT reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ssdevice.errors import InputError
from ssdevice.model.lora import check_peft

WEIGHTS = {"x.q_proj.lora_A.weight": torch.ones(2, 8), "x.q_proj.lora_B.weight": torch.ones(8, 2)}


def write(folder: Path, weights: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    save_file(WEIGHTS if weights is None else weights, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    return folder


def test_a_lora_passes(tmp_path: Path) -> None:
    check_peft(write(tmp_path))
    check_peft(write(tmp_path, rank_pattern={"k_proj": 1}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 10**9}, "rank 1000000000, but the largest of adapter_model.safetensors is 2"),
        ({"r": 0}, "rank 0"),
        ({"r": True}, "rank True"),
        ({"rank_pattern": {".*": 10**7}}, "rank 10000000"),
        ({"rank_pattern": [1]}, "rank_pattern is not an object"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type is 'PROMPT_TUNING', expected 'LORA'"),
        ({"layer_replication": [[0, 10**6]]}, "layer_replication"),
    ],
)
def test_a_configuration_that_does_not_fit_its_tensors_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        check_peft(write(tmp_path, **config))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
    weights["x.q_proj.lora_B.weight"][3, 1] = value
    with pytest.raises(InputError, match="'x.q_proj.lora_B.weight' has values that are not finite"):
        check_peft(write(tmp_path, weights))


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        check_peft(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match="no adapter_model.safetensors"):
        check_peft(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(InputError, match="not an object"):
        check_peft(tmp_path)
