"""Tiny random models of every family, with the features that make each family different switched
on.
"""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 97
LAYERS = 3
WINDOW = 3
"""Shorter than a draft path with its streams, so that windows cut into the tree as well."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# name -> (model type, config values beyond SIZES)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "head_dim": 16,
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi3-longrope": (
        "phi3",
        {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": (
        "stablelm",
        {
            "rope_parameters": PARTIAL,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
        },
    ),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": WINDOW, "use_bias": True, "tie_word_embeddings": True},
    ),
    "glm4": ("glm4", {"rope_parameters": PARTIAL, "head_dim": 16, "attention_bias": True}),
    "cohere": ("cohere", {"logit_scale": 1.5, "use_qk_norm": True, "tie_word_embeddings": True}),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "cohere2": (
        "cohere2",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "logit_scale": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "ministral": ("ministral", {"sliding_window": WINDOW, "layer_types": MIXED, "head_dim": 16}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "layer_types": MIXED, "head_dim": 8}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": False}),
    "glm": ("glm", {"rope_parameters": PARTIAL, "head_dim": 16, "attention_bias": True}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {"head_dim": 8}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "nemotron": ("nemotron", {"rope_parameters": PARTIAL}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
    "phi": ("phi", {"rope_parameters": PARTIAL, "qk_layernorm": True}),
    "opt-before": (
        "opt",
        {
            "ffn_dim": 48,
            "word_embed_proj_dim": 24,
            "do_layer_norm_before": True,
            "tie_word_embeddings": True,
        },
    ),
    "opt-after": (
        "opt",
        {
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
            "tie_word_embeddings": False,
        },
    ),
}

SEEDS = {"phi": 7, "opt-after": 3}
"""Where seed 0 gives a model that repeats one token, which would hide mistakes."""


def tiny_config(model_type: str, **values: object) -> Any:
    """A Hugging Face config of ``model_type`` in the tiny sizes, with ``values`` on top."""
    from transformers import AutoConfig

    # A config keeps names it does not know, and OPT knows neither of these.
    unknown = {"num_key_value_heads", "intermediate_size"} if model_type == "opt" else set()
    sizes = {name: value for name, value in SIZES.items() if name not in unknown}
    return AutoConfig.for_model(model_type, **{**sizes, **values})


def randomise(hf: torch.nn.Module, seed: int) -> None:
    """Parameters large enough that logits are far from uniform and every bias and norm weight
    matters.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in hf.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 1:
                value.add_(noise * 0.2)
            else:
                scale = 1.5 if "embed" in name or "lm_head" in name else 2.5
                value.copy_(noise * scale * value.shape[-1] ** -0.5)


def tiny_model(name: str) -> Any:
    """The model of MODELS called ``name``, in eval mode, with eager attention."""
    from transformers import AutoModelForCausalLM

    model_type, values = MODELS[name]
    hf = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **values), attn_implementation="eager"
    )
    randomise(hf, SEEDS.get(name, 0))
    return hf.eval()
