"""Models the step cannot express are refused, and the message says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdevice.config import Mode, StreamConfig, StreamMLP
from ssdevice.errors import ConfigError, ContextOverflowError, InputError, UnsupportedModelError
from ssdevice.model.backbone import Backbone
from ssdevice.model.families import FAMILIES, NOT_EXPRESSIBLE, Family, Sliding, family_of
from ssdevice.model.loading import build, load_hf, read_config
from tests.model.tiny import MODELS, randomise, tiny_config, tiny_model


def from_config(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


DENSE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "rope_theta": 10000.0}
"""What ``config.json`` of a dense decoder with a rotary embedding has."""


def test_an_unknown_family_is_named_with_those_that_are_known() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'gpt2' is not supported; supported: arcee, .*, starcoder2"
    ):
        family_of("gpt2", {"n_embd": 768, "n_layer": 12})


@pytest.mark.parametrize(
    ("model_type", "values", "missing"),
    [
        ("gpt_oss", {}, "attention with learned sinks and layers with a mixture of experts"),
        (
            "ministral3",
            DENSE,
            "queries scaled by their position; Ministral 8B of 2024 has model_type 'ministral'",
        ),
        (
            "granitemoehybrid",
            {"num_local_experts": 0},
            "a shared expert; Granite 3 has model_type 'granite'",
        ),
        (
            "gemma3",
            {"text_config": {}},
            "image inputs; a text-only model of this family has model_type 'gemma3_text'",
        ),
        ("new", DENSE | {"num_local_experts": 8}, "layers with a mixture of experts"),
        (
            "new",
            DENSE | {"n_routed_experts": 64, "kv_lora_rank": 512},
            "a mixture of experts and multi-head latent",
        ),
        (
            "new",
            DENSE | {"mamba_d_state": 16},
            "linear-attention, state-space or convolution layers",
        ),
        (
            "new",
            DENSE | {"layer_types": ["full_attention", "chunked_attention"]},
            "layers of type chunked_attention",
        ),
        ("new", {"text_config": DENSE, "vision_config": {"depth": 3}}, "inputs other than text"),
        ("new", DENSE | {"is_encoder_decoder": True}, "an encoder"),
    ],
)
def test_a_family_that_needs_more_than_a_table_entry_says_what(
    model_type: str, values: dict[str, Any], missing: str
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"family '{model_type}' is not supported: it has .*{missing}"
    ):
        family_of(model_type, values)


@pytest.mark.parametrize(
    "values",
    [
        DENSE,
        DENSE
        | {"num_local_experts": 0, "is_encoder_decoder": False, "layer_types": ["full_attention"]},
    ],
)
def test_only_a_dense_decoder_is_said_to_need_an_entry(values: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"'new' is not supported yet: .* an entry in ssdevice/model/famil",
    ):
        family_of("new", values)
    for key in DENSE:
        with pytest.raises(UnsupportedModelError, match="'new' is not supported; supported: "):
            family_of("new", {name: value for name, value in values.items() if name != key})


ENTRIES = (
    Family(),
    Family(norm="final_layernorm"),
    Family(sliding=Sliding.ALWAYS),
    Family(sliding=Sliding.BY_LAYER_TYPE),
    Family(sliding=Sliding.BY_LAYER_TYPE, rotary_by_layer_type=True),
    Family(sliding=Sliding.BY_LAYER_TYPE, rotary_by_layer_type=True, logit_scale="logit_scale"),
    Family(sliding=Sliding.BY_LAYER_TYPE, logit_softcap="final_logit_softcapping"),
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
NO_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
}


@pytest.mark.slow
def test_every_family_of_the_library_that_gets_this_hint_needs_only_an_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    hinted = []
    for model_type in sorted(
        set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - FAMILIES.keys() - {"gemma4_assistant"}
    ):  # no defaults
        with pytest.raises(UnsupportedModelError) as refused:
            family_of(model_type, AutoConfig.for_model(model_type).to_dict())
        if "may need only an entry" in str(refused.value):
            hinted.append(model_type)
    assert {"apertus", "jais2", "vaultgemma"} <= set(hinted)
    for model_type in hinted:
        values = {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **NO_DEFAULTS.get(model_type, {}),
        }
        hf = from_config(tiny_config(model_type, **values))
        randomise(hf, 0)
        ids = torch.arange(12)[None]
        with torch.no_grad():
            expected = hf(ids).logits
        assert (
            min(_difference(hf, model_type, entry, ids, expected, monkeypatch) for entry in ENTRIES)
            < 1e-4
        ), model_type


def _difference(
    hf: Any,
    model_type: str,
    entry: Family,
    ids: torch.Tensor,
    expected: torch.Tensor,
    patch: pytest.MonkeyPatch,
) -> float:
    """How far the logits of the wrapped model lie from its own with this entry of the table."""
    patch.setitem(FAMILIES, model_type, entry)
    distance = ids[0][:, None] - ids[0][None]

    def visible(window: int | None) -> torch.Tensor:
        return ((distance >= 0) & (distance < (window or len(distance))))[None, None]

    try:
        backbone = Backbone(hf, 32, 64)
        with torch.no_grad():
            h, _ = backbone.run(
                0, 3, backbone.embed(ids, ids), backbone.rope(ids), backbone.masks(visible)
            )
            return float((backbone.head(h) - expected).abs().max())
    except (
        AttributeError,
        LookupError,
        TypeError,
        UnsupportedModelError,
    ):  # the entry does not describe this model
        return float("inf")


def test_the_tables_do_not_contradict_each_other() -> None:
    assert not set(FAMILIES) & set(NOT_EXPRESSIBLE)


def test_an_unknown_family_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mixtral", "num_local_experts": 8}), "utf-8"
    )
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        load_hf(tmp_path)


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_layer_types_beyond_full_and_sliding_are_named(kind: str) -> None:
    config = tiny_config("qwen3", layer_types=["full_attention", kind, "full_attention"])
    hf = tiny_model("qwen3")
    hf.config.layer_types = config.layer_types
    with pytest.raises(
        UnsupportedModelError,
        match=f"qwen3 with layers of type {kind} is not supported: every layer",
    ):
        Backbone(hf, 32, 64)


def test_bidirectional_attention_is_refused() -> None:
    _, values = MODELS["gemma3_text"]
    hf = from_config(tiny_config("gemma3_text", **{**values, "use_bidirectional_attention": True}))
    with pytest.raises(
        UnsupportedModelError,
        match="gemma3_text with use_bidirectional_attention = True is not supp",
    ):
        Backbone(hf, 32, 64)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def test_dynamic_rope_is_supported_up_to_the_length_where_it_changes() -> None:
    hf = from_config(tiny_config("llama", max_position_embeddings=32, rope_parameters=DYNAMIC))
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        expected = hf.model.rotary_emb(torch.zeros(1), tokens)
        cos, sin = Backbone(hf, 32, 64).rope(tokens).tables[""]
    assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])
    with pytest.raises(
        UnsupportedModelError,
        match=r"beyond 32 positions \(rope type dynamic\): .* at most 32, not 33",
    ):
        Backbone(hf, 33, 64)


def test_longrope_is_supported_up_to_its_original_length() -> None:
    hf = tiny_model("phi3-longrope")
    Backbone(hf, 64, 128)
    with pytest.raises(
        UnsupportedModelError,
        match=r"beyond 64 positions \(rope type longrope\): .* most 64, not 65",
    ):
        Backbone(hf, 65, 128)


def test_length_dependence_of_one_layer_type_is_enough() -> None:
    _, values = MODELS["gemma3_text"]
    rope = {
        "full_attention": DYNAMIC,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    hf = from_config(
        tiny_config(
            "gemma3_text", **{**values, "rope_parameters": rope, "max_position_embeddings": 32}
        )
    )
    with pytest.raises(
        UnsupportedModelError, match=r"\(rope type default, dynamic\): .* at most 32, not 48"
    ):
        Backbone(hf, 48, 64)


def test_a_learned_position_table_bounds_the_context() -> None:
    hf = tiny_model("opt-before")
    Backbone(hf, 256, 300)
    with pytest.raises(
        ContextOverflowError, match="context 257 is longer than the model's 256 positions"
    ):
        Backbone(hf, 257, 300)


def test_values_that_a_family_ignores_change_nothing() -> None:
    hf = tiny_model("llama")
    hf.config.sliding_window = 4
    hf.config.final_logit_softcapping = 1.0
    backbone = Backbone(hf, 32, 64)
    assert backbone.windows() == {None}
    h = torch.randn(1, 2, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone.head(h), hf.lm_head(hf.model.norm(h)))


def test_replacing_the_mlp_needs_an_mlp() -> None:
    config = StreamConfig(mode=Mode.LOSSLESS, gamma=2, msa_layers=1, stream_mlp=StreamMLP.ADAPTER)
    with pytest.raises(UnsupportedModelError, match="needs an mlp module; use 'base\\+adapter'"):
        build(tiny_model("opt-before"), config, 32)


@pytest.mark.parametrize("msa_layers", [3, 4])
def test_msa_layers_leave_a_layer_to_start_from(msa_layers: int) -> None:
    with pytest.raises(
        ConfigError,
        match=f"N_s = {msa_layers} MSA layers need a model of more layers, this one has 3",
    ):
        build(tiny_model("llama"), StreamConfig(gamma=2, msa_layers=msa_layers), 32)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no config.json; expected a Hugging Face model folder"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}', "utf-8")
    with pytest.raises(InputError, match="has no model_type"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    with pytest.raises(InputError, match="no .safetensors weights"):
        load_hf(tmp_path)


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    """AutoModelForCausalLM would apply it."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    (tmp_path / "adapter_config.json").write_text("{}", "utf-8")
    with pytest.raises(
        InputError,
        match=r"has an adapter beside the model \(adapter_config.json\).* with --adapter",
    ):
        load_hf(tmp_path)
    (tmp_path / "config.json").unlink()  # a folder of an adapter, given as the model
    with pytest.raises(InputError, match="--adapter"):
        read_config(tmp_path)


def test_ends_with_equal_weights_share_them() -> None:
    hf = tiny_model("stablelm")
    assert hf.lm_head.weight is not hf.model.embed_tokens.weight
    backbone = build(hf, None, 32).backbone
    assert backbone.lm_head.weight is not backbone.embed_tokens.weight
    with torch.no_grad():
        hf.lm_head.weight.copy_(hf.model.embed_tokens.weight)
    backbone = build(hf, None, 32).backbone
    assert backbone.lm_head.weight is backbone.embed_tokens.weight
