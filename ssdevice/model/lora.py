"""LoRA of PEFT, merged into the base's linears or kept beside them so that several apps can share the base."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ssdevice.adapters.settings import PEFT_WEIGHTS
from ssdevice.errors import InputError, UnsupportedModelError, first_line
from ssdevice.model.mapped import release
from ssdevice.model.peft_files import check_peft
from ssdevice.model.streams import LowRank

# PEFT does not check its configuration, so mistakes in it surface as any of these.
REFUSALS = (
    OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, ImportError, re.error,
)  # fmt: skip


class LoraLinear(nn.Module):
    """``base(x) + up(down(x))``. ``adapter.up`` includes PEFT's scaling, so that apps differ only in their ranks."""

    def __init__(self, base: nn.Linear, adapter: LowRank) -> None:
        super().__init__()
        self.base = base
        self.adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        """``[.., inputs] -> [.., outputs]``."""
        return cast(Tensor, self.base(x) + self.adapter(x))


def merge_lora(hf: Any, adapter: Path) -> Any:
    """The model with a PEFT adapter merged into its weights; raises InputError."""
    wrapped = open_lora(hf, adapter)
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        for part in wrapped.modules():
            if isinstance(part, BaseTunerLayer):
                part.merge()
                release()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that these are merged already
            return wrapped.merge_and_unload().eval()
    except REFUSALS as error:
        raise InputError(f"{adapter}: the PEFT adapter cannot be merged ({first_line(error)})") from error


def attach_lora(hf: Any, adapter: Path) -> Any:
    """The model with a PEFT adapter's linears as ``LoraLinear``; raises InputError, UnsupportedModelError.

    Only a plain LoRA of linears can stay separate, see ``ssdevice.adapters.lora_options``.
    """
    hf = open_lora(hf, adapter, apart=True).base_model.model
    from peft.tuners.lora import Linear

    for name, module in list(hf.named_modules()):
        if not hasattr(module, "lora_A"):
            continue
        base = getattr(module, "base_layer", None)
        if not isinstance(module, Linear) or not isinstance(base, nn.Linear):
            raise UnsupportedModelError(f"{adapter}: {name} is a {type(base).__name__}; slots are for linears")
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
    """PEFT's model of a base and an adapter folder, to be merged or kept ``apart``; raises InputError."""
    check_peft(adapter, apart)
    from peft import PeftConfig, get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the base may lie elsewhere than when the adapter was saved
            config = PeftConfig.from_pretrained(str(adapter))
            config.inference_mode = not trainable
            # PeftModel.from_pretrained takes the same two steps, but does not say which tensors did not fit.
            wrapped = get_peft_model(hf, config)
            found = wrapped.load_adapter(str(adapter), "default", is_trainable=trainable, torch_device="cpu")
    except (*REFUSALS, SafetensorError) as error:
        raise InputError(f"{adapter}: the PEFT adapter cannot be loaded ({first_line(error)})") from error
    for what, names in (("unknown", found.unexpected_keys), ("missing", found.missing_keys)):
        if names:
            name = sorted(names)[0].replace(".default", "", 1)
            raise InputError(
                f"{adapter / PEFT_WEIGHTS}: tensor {name!r} is {what}, and {len(names) - 1} more: is it for this model?"
            )
    return wrapped
