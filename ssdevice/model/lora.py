"""LoRA of PEFT: merged into the base's linears, or kept beside them.

Kept beside them, several apps can share the base.
"""

import re
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ssdevice.adapters.settings import PEFT_CONFIG, PEFT_WEIGHTS
from ssdevice.adapters.weights import check_options
from ssdevice.config import read_json
from ssdevice.errors import (
    REFUSALS,
    InputError,
    UnsupportedModelError,
    check_no_pointer,
    first_line,
)
from ssdevice.model.adapter import check_values
from ssdevice.model.mapped import release
from ssdevice.model.stored import wrapper_note
from ssdevice.model.streams import LowRank

LORA = "LORA"
EMBEDDING = re.compile(r"(embed_tokens|lm_head)(\.modules_to_save\.default|\.base_layer)?\.weight$")
"""Names of whole embeddings and heads among PEFT's tensors."""
SLACK = 4
"""How many times the largest rank of the tensors a configuration may name.

It may name a rank that no tensor has, because patterns can replace it, but not one that fills
memory.
"""


class LoraLinear(nn.Module):
    """``base(x) + up(down(x))``.

    ``adapter.up`` includes PEFT's scaling, so that apps differ only in their ranks.
    """

    def __init__(self, base: nn.Linear, adapter: LowRank) -> None:
        super().__init__()
        self.base = base
        self.adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        """``[.., inputs] -> [.., outputs]``."""
        return cast(Tensor, self.base(x) + self.adapter(x))


def merge_lora(hf: Any, adapter: Path) -> Any:
    """The model with a PEFT adapter merged into its weights; raises InputError."""
    embedding = hf.get_input_embeddings()
    head = hf.get_output_embeddings()
    wrapped = open_lora(hf, adapter)
    from peft.tuners.tuners_utils import BaseTunerLayer

    changes_embedding = hf.get_input_embeddings() is not embedding
    changes_head = hf.get_output_embeddings() is not head
    if (changes_embedding or changes_head) and head.weight is embedding.weight:
        # Merging is in place and would change both ends; not merged, an adapter changes only the
        # end that it is for.
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    try:
        for part in wrapped.modules():
            if isinstance(part, BaseTunerLayer):
                part.merge()
                release()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that these are merged already
            merged = wrapped.merge_and_unload().eval()
    except REFUSALS as error:
        raise InputError(
            f"{adapter}: the PEFT adapter cannot be merged ({first_line(error)})"
        ) from error
    for name, module in merged.named_modules():
        # Of one PEFT layer inside another only the outer one is merged.
        if type(module).__module__.startswith("peft."):
            raise InputError(
                f"{adapter}: PEFT does not merge {name}, which the adapter changes in two ways: "
                "trainable_token_indices (of a tied head too) and a LoRA or modules_to_save; "
                "train it in one way only"
            )
    return merged


def attach_lora(hf: Any, adapter: Path) -> Any:
    """The model with a PEFT adapter's linears as ``LoraLinear``.

    Only a plain LoRA of linears can stay separate, see ``check_options``. Raises InputError or
    UnsupportedModelError.
    """
    hf = open_lora(hf, adapter, apart=True).base_model.model
    from peft.tuners.lora import Linear

    for name, module in list(hf.named_modules()):
        if not hasattr(module, "lora_A"):
            continue
        base = getattr(module, "base_layer", None)
        if not isinstance(module, Linear) or not isinstance(base, nn.Linear):
            raise UnsupportedModelError(
                f"{adapter}: {name} is a {type(base).__name__}; slots are for linears: "
                "export this app by itself"
            )
        down = cast(Tensor, module.lora_A["default"].weight)
        up = cast(Tensor, module.lora_B["default"].weight)
        low = LowRank(base.in_features, base.out_features, down.shape[0])
        with torch.no_grad():
            low.down.weight.copy_(down)
            low.up.weight.copy_(up * module.scaling["default"])
        owner, _, leaf = name.rpartition(".")
        setattr(hf.get_submodule(owner), leaf, LoraLinear(base, low))
    return hf.eval()


def open_lora(hf: Any, adapter: Path, trainable: bool = False, apart: bool = False) -> Any:
    """PEFT's model of a base and an adapter folder, to be merged or kept ``apart``.

    Raises InputError.
    """
    check_peft(adapter, apart, len(hf.get_input_embeddings().weight))
    from peft import PeftConfig, get_peft_model

    try:
        with warnings.catch_warnings():
            # They say that the base lies elsewhere than when the adapter was saved.
            warnings.simplefilter("ignore")
            config = PeftConfig.from_pretrained(str(adapter))
            config.inference_mode = not trainable
            # PeftModel.from_pretrained takes the same two steps, but does not say which tensors did
            # not fit.
            wrapped = get_peft_model(hf, config)
            found = wrapped.load_adapter(
                str(adapter), "default", is_trainable=trainable, torch_device="cpu"
            )
    except (*REFUSALS, SafetensorError) as error:
        raise InputError(
            f"{adapter}: the PEFT adapter cannot be loaded ({first_line(error)})"
        ) from error
    file = adapter / PEFT_WEIGHTS
    unknown = sorted(found.unexpected_keys)
    missing = [name.replace(".default", "", 1) for name in sorted(found.missing_keys)]
    if unknown:
        note = wrapper_note(missing, unknown)
        if note:
            raise InputError(
                f"{file}: tensor {unknown[0]!r} is unknown, and {len(unknown) - 1} more{note}"
            )
        raise InputError(
            f"{file}: tensor {unknown[0]!r} is unknown, and {len(unknown) - 1} more: "
            "is it for this model?"
        )
    if missing:
        raise InputError(
            f"{file}: tensor {missing[0]!r} is missing, and {len(missing) - 1} more: "
            "is it for this model?"
        )
    return wrapped


def check_peft(folder: Path, apart: bool = False, vocab: int | None = None) -> None:
    """Raise InputError unless a folder has a LoRA with finite tensors of the configured ranks.

    ``apart``: whether it will stay separate. ``vocab``: tokens of the model it is for, if known.

    Without this check the configured rank would decide how much memory is allocated, a missing file
    would be looked up on the hub under the folder's name, and a NaN would be merged into the base.
    """
    file = folder / PEFT_CONFIG
    config = read_json(file)
    if not isinstance(config, dict):
        raise InputError(f"{file}: not an object")
    if config.get("peft_type") != LORA:
        raise InputError(
            f"{file}: peft_type is {str(config.get('peft_type'))[:40]!r}, expected {LORA!r}"
        )
    check_options(folder, config, apart)
    weights = folder / PEFT_WEIGHTS
    if not weights.is_file():
        raise InputError(
            f"{folder}: no {PEFT_WEIGHTS}; "
            "if it has other files, save it again with PEFT (save_pretrained)"
        )
    largest = _check_weights(weights, vocab)
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name), (dict, type(None))):
            raise InputError(f"{file}: {name} is not an object")
    patterns = config.get("rank_pattern") or {}
    for rank in [config.get("r"), *patterns.values()]:
        if type(rank) is not int or not 1 <= rank <= SLACK * largest:
            raise InputError(
                f"{file}: rank {repr(rank)[:40]}, but the largest of {PEFT_WEIGHTS} is {largest}"
            )


def _check_weights(file: Path, vocab: int | None) -> int:
    """The largest rank of a LoRA's tensors.

    Raises InputError for values that are not finite, and for embeddings or a head of another
    vocabulary than the model's ``vocab`` tokens.
    """
    largest = 0
    try:
        check_no_pointer(file)
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                value = tensors.get_tensor(name)
                check_values(file, name, value)
                if vocab is not None and EMBEDDING.search(name) and len(value) != vocab:
                    raise InputError(
                        f"{file.parent}: {name} is for a vocabulary of {len(value)} tokens, the "
                        f"model has {vocab}: resize the model as it was for training "
                        f"(resize_token_embeddings({len(value)})) and save it"
                    )
                if "lora_A" in name or "lora_embedding_A" in name:
                    largest = max(largest, *value.shape[:1])
    except (
        OSError,
        SafetensorError,
        TypeError,
        ValueError,
        OverflowError,
        NotImplementedError,
    ) as error:
        raise InputError(f"{file}: cannot be read as safetensors ({error})") from error
    return largest
