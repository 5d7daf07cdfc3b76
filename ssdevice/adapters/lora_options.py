"""The options of PEFT's LoRA that ssdevice accepts: one list for merging, slots, Core ML functions and training.

PEFT itself merges a LoRA and knows its options. Where adapters stay separate (slots of ONNX and ExecuTorch, functions
of Core ML) only the two factors of a linear and their scaling are kept, so every other effect of an option would be
lost silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssdevice.errors import InputError, UnsupportedModelError

PLAIN = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias", "use_rslora", "init_lora_weights",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
})  # fmt: skip
"""Options that are accepted with any value, except for ``bias`` and ``init_lora_weights``."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""``init_lora_weights`` that leave the base as it is; others subtract the initial factors from it."""
MERGED = frozenset({
    "use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias", "fan_in_fan_out",
    "use_qalora", "alora_invocation_tokens", "arrow_config", "monteclora_config", "kasa_config", "use_bdlora",
    "velora_config", "megatron_config",
})  # fmt: skip
"""Options that only PEFT can apply, or refuse, when it merges."""
RANDOM_START = "pissa_niter_"
"""Prefix of ``init_lora_weights`` that change the base by a random, unrepeatable approximation."""


def check_options(folder: Path, config: Mapping[str, Any], apart: bool) -> None:
    """Raise InputError for an option in ``adapter_config.json`` that would be ignored.

    ``apart``: the LoRA stays separate from the base.
    """
    if config.get("layer_replication"):
        raise InputError(f"{folder}: layer_replication changes the base model; it is not supported")
    start = config.get("init_lora_weights", True)
    if str(start).startswith(RANDOM_START):
        raise InputError(
            f"{folder}: init_lora_weights={str(start)[:40]!r} changes the base at random; convert it to a plain LoRA"
        )
    for option, value in config.items():
        if value and option not in PLAIN | MERGED | {"layer_replication"}:
            raise InputError(f"{folder}: this version does not know the LoRA option {option[:60]!r}")
    if not apart:
        return
    wanted = [option for option in sorted(MERGED) if config.get(option)]
    if config.get("bias", "none") != "none":
        wanted.append(f"bias={str(config['bias'])[:40]!r}")
    if start not in PLAIN_STARTS:
        wanted.append(f"init_lora_weights={str(start)[:40]!r}")
    if wanted:
        raise UnsupportedModelError(
            f"{folder}: {wanted[0]} does not fit into a slot of a shared base; export this app by itself"
        )
