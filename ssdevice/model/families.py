"""The layout of each Hugging Face family: one default and a small table of exceptions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ssdevice.errors import UnsupportedModelError


class Sliding(Enum):
    """Which layers of a family read ``config.sliding_window``.

    The others ignore it, even if the config sets it.
    """

    NEVER = "never"
    ALWAYS = "always"
    BY_LAYER_TYPE = "by layer type"


@dataclass(frozen=True)
class Family:
    """Attribute paths inside ``*ForCausalLM``, and what its forward does around the layers.

    - ``rotary_by_layer_type``: whether the rotary module takes the layer type.
    - ``position_embedding``: path of a learned position table, with ``position_offset`` rows before
      position 0.

    Names of values in the config:

    - ``embed_scale`` multiplies the embedding.
    - ``logit_scale`` multiplies the logits, ``logit_divisor`` divides them, and ``logit_softcap``
      bounds a tanh over them.
    """

    decoder: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens"
    norm: str = "norm"
    rotary: str | None = "rotary_emb"
    rotary_by_layer_type: bool = False
    sliding: Sliding = Sliding.NEVER
    position_embedding: str | None = None
    position_offset: int = 0
    embed_scale: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    logit_softcap: str | None = None
    refuse: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Config key -> the values of it that this wrapper can express, the default first."""

    @property
    def layers_path(self) -> str:
        """Path of the layers in the model, as in PEFT's names: ``model.layers``."""
        return f"{self.decoder}.{self.layers}"


_LLAMA_LIKE = (
    "llama",
    "arcee",
    "ernie4_5",
    "gemma",
    "glm",
    "glm4",
    "helium",
    "hunyuan_v1_dense",
    "nemotron",
    "olmo",
    "olmo2",
    "seed_oss",
    "stablelm",
)
_ALL_LAYERS_SLIDE = ("mistral", "phi3", "starcoder2")
_SOME_LAYERS_SLIDE = ("exaone4", "ministral", "qwen2", "qwen3", "smollm3")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_LLAMA_LIKE, Family()),
    **dict.fromkeys(_ALL_LAYERS_SLIDE, Family(sliding=Sliding.ALWAYS)),
    **dict.fromkeys(_SOME_LAYERS_SLIDE, Family(sliding=Sliding.BY_LAYER_TYPE)),
    "gemma2": Family(sliding=Sliding.BY_LAYER_TYPE, logit_softcap="final_logit_softcapping"),
    "gemma3_text": Family(
        sliding=Sliding.BY_LAYER_TYPE,
        rotary_by_layer_type=True,
        logit_softcap="final_logit_softcapping",
        refuse={"use_bidirectional_attention": (None, False)},
    ),
    "olmo3": Family(sliding=Sliding.BY_LAYER_TYPE, rotary_by_layer_type=True),
    "granite": Family(embed_scale="embedding_multiplier", logit_divisor="logits_scaling"),
    "cohere": Family(logit_scale="logit_scale"),
    "cohere2": Family(sliding=Sliding.BY_LAYER_TYPE, logit_scale="logit_scale"),
    "phi": Family(norm="final_layernorm"),
    "opt": Family(
        decoder="model.decoder",
        norm="final_layer_norm",
        rotary=None,
        position_embedding="embed_positions",
        position_offset=2,
    ),
}


_EXPERTS = "layers with a mixture of experts"
_SINKS = "attention with learned sinks"
_OTHER_LAYOUT = ("falcon", "gpt_neox", "gpt_neox_japanese", "hrm_text", "modernbert-decoder")
NOT_EXPRESSIBLE: dict[str, str] = {
    "gpt_oss": f"{_SINKS} and {_EXPERTS}",
    "granite_swa": f"{_SINKS}; Granite 3 has model_type 'granite'",
    "granitemoehybrid": "state-space layers or a shared expert; Granite 3 has model_type 'granite'",
    "ministral3": "queries scaled by their position; "
    "Ministral 8B of 2024 has model_type 'ministral' or 'mistral'",
    "gemma3": "image inputs; a text-only model of this family has model_type 'gemma3_text'",
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), "inputs of every layer beside its rows"),
    "diffllama": "differential attention",
    "nanochat": "norms without weights around the embedding",
    **dict.fromkeys(_OTHER_LAYOUT, "layers of another layout than llama's"),
}
"""Families that need more than a table entry, and what they have that no entry expresses.

Only those whose configs do not show it by their keys, see ``_SHOWN_BY_KEYS``.
"""

_LINEAR_KEYS = "mamba|ssm_|conv_|conv1d|linear_(num|key|conv|attn)"
_SHOWN_BY_KEYS = {
    "expert|moe_": _EXPERTS,
    _LINEAR_KEYS: "linear-attention, state-space or convolution layers",
    "kv_lora_rank": "multi-head latent attention",
    "(text|vision|audio|encoder)_config$": "inputs other than text",
    "is_encoder_decoder|add_cross_attention": "an encoder",
}
"""A pattern of keys in a config that are set -> what the model has."""
_KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}
_DENSE = (
    {"hidden_size"},
    {"num_hidden_layers"},
    {"num_attention_heads"},
    {"rope_theta", "rope_parameters"},
)
"""A dense decoder's config has one key of each."""


def family_of(model_type: str, config: Mapping[str, Any] | None = None) -> Family:
    """The family of a ``config.model_type``.

    ``config``: the values in ``config.json``, which show what an unknown family has. Raises
    UnsupportedModelError, which says what is missing.
    """
    family = FAMILIES.get(model_type)
    if family is not None:
        return family
    shown = config or {}
    missing = NOT_EXPRESSIBLE.get(model_type) or " and ".join(_beyond(shown))
    hint = ""
    if missing:
        hint = f": it has {missing}"
    elif all(keys & shown.keys() for keys in _DENSE):
        hint = (
            " yet: a dense decoder like this one may need only an entry in "
            "ssdevice/model/families.py"
        )
    supported = ", ".join(sorted(FAMILIES))
    raise UnsupportedModelError(
        f"model family {model_type!r} is not supported{hint}; supported: {supported}"
    )


def _beyond(config: Mapping[str, Any]) -> list[str]:
    """What a config shows that no entry of the table can express."""
    found = list[str]()
    set_keys = [key for key, value in config.items() if value]
    for pattern, what in _SHOWN_BY_KEYS.items():
        if any(re.search(pattern, key) for key in set_keys):
            found.append(what)
    kinds = {str(kind) for kind in config.get("layer_types") or ()} - _KINDS_OF_LAYERS
    if kinds:
        found.append(f"layers of type {', '.join(sorted(kinds))}")
    return found
