"""The layout of each Hugging Face family: one default and a small table of exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ssdevice.errors import UnsupportedModelError


class Sliding(Enum):
    """Which layers of a family read ``config.sliding_window``; others ignore it even if the config sets it."""

    NEVER = "never"
    ALWAYS = "always"
    BY_LAYER_TYPE = "by layer type"


@dataclass(frozen=True)
class Family:
    """Attribute paths inside ``*ForCausalLM``, and what its forward does around the layers.

    Names of config values: ``embed_scale`` multiplies the embedding, ``logit_scale`` multiplies and ``logit_divisor``
    divides the logits, ``logit_softcap`` bounds a tanh over them. ``rotary_by_layer_type``: the rotary module takes the
    layer type. ``position_embedding``: path of a learned position table, with ``position_offset`` rows before
    position 0.
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
    refuse: dict[str, object] = field(default_factory=dict)
    """Config values this wrapper cannot express: key -> the only value that is supported."""

    @property
    def layers_path(self) -> str:
        """Path of the layers in the model, as in PEFT's names: ``model.layers``."""
        return f"{self.decoder}.{self.layers}"


_LLAMA_LIKE = Family()
_ALL_LAYERS_SLIDE = Family(sliding=Sliding.ALWAYS)
_SOME_LAYERS_SLIDE = Family(sliding=Sliding.BY_LAYER_TYPE)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA_LIKE,
    "arcee": _LLAMA_LIKE,
    "ernie4_5": _LLAMA_LIKE,
    "gemma": _LLAMA_LIKE,
    "glm": _LLAMA_LIKE,
    "glm4": _LLAMA_LIKE,
    "helium": _LLAMA_LIKE,
    "hunyuan_v1_dense": _LLAMA_LIKE,
    "nemotron": _LLAMA_LIKE,
    "olmo": _LLAMA_LIKE,
    "olmo2": _LLAMA_LIKE,
    "seed_oss": _LLAMA_LIKE,
    "stablelm": _LLAMA_LIKE,
    "mistral": _ALL_LAYERS_SLIDE,
    "phi3": _ALL_LAYERS_SLIDE,
    "starcoder2": _ALL_LAYERS_SLIDE,
    "exaone4": _SOME_LAYERS_SLIDE,
    "ministral": _SOME_LAYERS_SLIDE,
    "qwen2": _SOME_LAYERS_SLIDE,
    "qwen3": _SOME_LAYERS_SLIDE,
    "smollm3": _SOME_LAYERS_SLIDE,
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
_LINEAR = "linear-attention or state-space layers"
_SINKS = "attention with learned sinks"

NOT_EXPRESSIBLE: dict[str, str] = {
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "gpt_oss": f"{_SINKS} and {_EXPERTS}",
    "granite_swa": _SINKS,
    "llama4_text": f"chunked attention and {_EXPERTS}",
    "qwen3_next": _LINEAR,
    "mamba": _LINEAR,
    "falcon_h1": _LINEAR,
    "lfm2": "convolution layers",
    "gemma3": "image inputs; a text-only model of this family has model_type 'gemma3_text'",
}
"""Families that need more than a table entry -> what the step graph cannot express."""


def family_of(model_type: str) -> Family:
    """The family of a ``config.model_type``. Raises UnsupportedModelError, which says what is missing."""
    family = FAMILIES.get(model_type)
    if family is not None:
        return family
    known = ", ".join(sorted(FAMILIES))
    missing = NOT_EXPRESSIBLE.get(model_type)
    if missing is not None:
        raise UnsupportedModelError(
            f"model family {model_type!r} is not supported: it has {missing}; supported: {known}"
        )
    raise UnsupportedModelError(
        f"model family {model_type!r} is not supported; supported are {known} "
        "(a decoder like these needs one entry in ssdevice/model/families.py)"
    )
