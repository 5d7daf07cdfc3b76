"""Where each Hugging Face family keeps its parts: one default and a small table of exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssdevice.errors import UnsupportedModelError


@dataclass(frozen=True)
class Family:
    """Attribute paths inside ``*ForCausalLM``, and what its forward does around the layers.

    ``embed_scale``/``logit_scale``/``logit_divisor`` name config values that multiply the embedding, multiply the
    logits and divide the logits. ``rotary_by_layer_type``: the rotary module takes the layer type.
    ``position_embedding``: path of a learned position table, with ``position_offset`` rows before position 0.
    """

    decoder: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens"
    norm: str = "norm"
    rotary: str | None = "rotary_emb"
    rotary_by_layer_type: bool = False
    project_in: str | None = None
    project_out: str | None = None
    position_embedding: str | None = None
    position_offset: int = 0
    embed_scale: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    refuse: dict[str, object] = field(default_factory=dict)
    """Config values this wrapper cannot express: key -> the only value that is supported."""


_LLAMA_LIKE = Family()

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "phi3": _LLAMA_LIKE,
    "gemma2": _LLAMA_LIKE,
    "olmo2": _LLAMA_LIKE,
    "stablelm": _LLAMA_LIKE,
    "starcoder2": _LLAMA_LIKE,
    "glm4": _LLAMA_LIKE,
    "smollm3": _LLAMA_LIKE,
    "gemma3_text": Family(rotary_by_layer_type=True, refuse={"use_bidirectional_attention": (None, False)}),
    "granite": Family(embed_scale="embedding_multiplier", logit_divisor="logits_scaling"),
    "cohere": Family(logit_scale="logit_scale"),
    "phi": Family(norm="final_layernorm"),
    "opt": Family(
        decoder="model.decoder",
        norm="final_layer_norm",
        rotary=None,
        project_in="project_in",
        project_out="project_out",
        position_embedding="embed_positions",
        position_offset=2,
    ),
}


def family_of(model_type: str) -> Family:
    """The family of a ``config.model_type``; raises UnsupportedModelError naming the supported ones."""
    try:
        return FAMILIES[model_type]
    except KeyError:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"model family {model_type!r} is not supported; supported are {known} "
            "(a decoder like these needs one entry in ssdevice/model/families.py)"
        ) from None
