"""Checks of a PEFT adapter's files before PEFT reads them, because PEFT trusts their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ssdevice.adapters.lora_options import check_options
from ssdevice.adapters.settings import PEFT_CONFIG, PEFT_WEIGHTS
from ssdevice.config import read_json
from ssdevice.errors import InputError

LORA = "LORA"
SLACK = 4
"""A configuration may name a rank that no tensor has (patterns can replace it), but not one that fills memory."""


def check_peft(folder: Path, apart: bool = False) -> None:
    """Raise InputError unless a folder holds a LoRA with finite tensors of the configured ranks.

    ``apart``: it will stay separate from the base, see ``ssdevice.adapters.lora_options``.

    Without this check the configured rank decides how much memory is allocated, a missing file is looked up on the hub
    under the folder's name, and a NaN is merged into the base.
    """
    file = folder / PEFT_CONFIG
    config = read_json(file)
    if not isinstance(config, dict):
        raise InputError(f"{file}: not an object")
    if config.get("peft_type") != LORA:
        raise InputError(f"{file}: peft_type is {str(config.get('peft_type'))[:40]!r}, expected {LORA!r}")
    check_options(folder, config, apart)
    weights = folder / PEFT_WEIGHTS
    if not weights.is_file():
        raise InputError(f"{folder}: no {PEFT_WEIGHTS}")
    largest = _check_weights(weights)
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise InputError(f"{file}: rank_pattern is not an object")
    for rank in (config.get("r"), *pattern.values()):
        if type(rank) is not int or not 1 <= rank <= SLACK * largest:
            raise InputError(f"{file}: rank {str(rank)[:40]}, but the largest of {PEFT_WEIGHTS} is {largest}")


def _check_weights(file: Path) -> int:
    """The largest rank of a LoRA's tensors. Raises InputError for values that are not finite."""
    largest = 0
    try:
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                value: Any = tensors.get_tensor(name)
                if value.is_floating_point() and not torch.isfinite(value).all():
                    raise InputError(f"{file}: tensor {name!r} has values that are not finite")
                if "lora_A" in name or "lora_embedding_A" in name:
                    largest = max(largest, *value.shape[:1])
    except (OSError, SafetensorError, TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise InputError(f"{file}: cannot be read as safetensors ({error})") from error
    return largest
