"""LoRA of PEFT, merged into the base's linears or kept beside them so that several apps can share
the base.
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
"""A configuration may name a rank that no tensor has (patterns can replace it), but not one that
fills memory.
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
    ends = embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    wrapped = open_lora(hf, adapter)
    from peft.tuners.tuners_utils import BaseTunerLayer

    if (
        hf.get_input_embeddings(),
        hf.get_output_embeddings(),
    ) != ends and head.weight is embedding.weight:
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
        if type(module).__module__.startswith(
            "peft."
        ):  # one layer inside another: only the outer one is merged
            ways = "trainable_token_indices (of a tied head too) and a LoRA or modules_to_save"
            what = f"PEFT does not merge {name}, which the adapter changes in two ways: {ways}"
            raise InputError(f"{adapter}: {what}; train it in one way only")
    return merged


def attach_lora(hf: Any, adapter: Path) -> Any:
    """The model with a PEFT adapter's linears as ``LoraLinear``; only a plain LoRA of linears can
    stay separate, see ``check_options``.

    Raises InputError, UnsupportedModelError.
    """
    hf = open_lora(hf, adapter, apart=True).base_model.model
    from peft.tuners.lora import Linear

    for name, module in list(hf.named_modules()):
        if not hasattr(module, "lora_A"):
            continue
        base = getattr(module, "base_layer", None)
        if not isinstance(module, Linear) or not isinstance(base, nn.Linear):
            what = f"{name} is a {type(base).__name__}; slots are for linears"
            raise UnsupportedModelError(f"{adapter}: {what}: export this app by itself")
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
    """PEFT's model of a base and an adapter folder, to be merged or kept ``apart``; raises
    InputError.
    """
    check_peft(adapter, apart, len(hf.get_input_embeddings().weight))
    from peft import PeftConfig, get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the base may lie elsewhere than when the adapter was saved
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
    missing = [name.replace(".default", "", 1) for name in sorted(found.missing_keys)]
    for what, names in (("unknown", sorted(found.unexpected_keys)), ("missing", missing)):
        if names:
            why = wrapper_note(missing, names) or ": is it for this model?"
            raise InputError(
                f"{adapter / PEFT_WEIGHTS}: tensor {names[0]!r} is {what}, and {len(names) - 1} more{why}"
            )
    return wrapped


def check_peft(folder: Path, apart: bool = False, vocab: int | None = None) -> None:
    """Raise InputError unless a folder has a LoRA with finite tensors of the configured ranks.

    ``apart``: it will stay separate; ``vocab``: tokens of the model it is for, if known. Otherwise
    the configured rank would decide how much memory is allocated, a missing file would be looked up
    on the hub under the folder's name, and a NaN would be merged into the base.
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
        how = "if it has other files, save it again with PEFT (save_pretrained)"
        raise InputError(f"{folder}: no {PEFT_WEIGHTS}; {how}")
    largest = _check_weights(weights, vocab)
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name), (dict, type(None))):
            raise InputError(f"{file}: {name} is not an object")
    for rank in (config.get("r"), *(config.get("rank_pattern") or {}).values()):
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
                if vocab is not None and EMBEDDING.search(name) and (found := len(value)) != vocab:
                    what = f"{name} is for a vocabulary of {found} tokens, the model has {vocab}"
                    how = f"resize the model as it was for training (resize_token_embeddings({found})) and save it"
                    raise InputError(f"{file.parent}: {what}: {how}")
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
