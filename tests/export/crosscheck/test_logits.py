"""Our logits beside those of transformers: right models of every family pass, and no fault does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ssdevice.errors import ParityError
from ssdevice.export.crosscheck.check import Expected, compare_logits
from ssdevice.model.loading import build
from ssdevice.model.step import StreamModel
from tests.model.tiny import MODELS, VOCAB, randomise, tiny_config, tiny_model

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
FIRST = 19


@torch.no_grad()
def expected_of(hf: Any) -> Expected:
    logits = hf(torch.tensor([TOKENS]), use_cache=False).logits[0, FIRST:]
    return Expected(TOKENS, FIRST, logits, logits.argmax(-1).tolist())


def deep(model_type: str, layers: int, scale: float) -> Any:
    """A random model whose rounding grows with depth; ``scale``: of all weights, which saturates
    its attention.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, num_hidden_layers=layers, hidden_size=64)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(hf, 1)
    with torch.no_grad():
        for value in hf.parameters():
            value.mul_(scale)
    return hf.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_right_model_of_every_family_passes(name: str) -> None:
    hf = tiny_model(name)
    compare_logits(build(copy.deepcopy(hf), None, 64).eval(), expected_of(hf), name)


@pytest.mark.parametrize(("name", "scale"), [("gemma2", 1), ("qwen3", 3), ("olmo2", 3), ("opt", 3)])
def test_models_that_amplify_rounding_pass(name: str, scale: float) -> None:
    """With OPT the smallest change of one product changes the logits by as much as they are."""
    hf = deep(name, 24, scale)
    compare_logits(build(copy.deepcopy(hf), None, 64).eval(), expected_of(hf), name)


def layer(model: StreamModel, index: int = 1) -> Any:
    return model.backbone.layers[index]


def swapped_layers(model: StreamModel) -> None:
    layers = model.backbone.layers
    layers[0], layers[1] = layers[1], layers[0]


def rope_without_its_factor(model: StreamModel) -> None:
    for name in ("rope_cos_", "rope_sin_"):
        table = model.backbone.get_buffer(name)
        model.backbone.register_buffer(
            name, table.repeat_interleave(2, 0)[: len(table)], persistent=False
        )


def rope_of_other_channels(model: StreamModel) -> None:
    for name in ("rope_cos_", "rope_sin_"):
        model.backbone.register_buffer(
            name, model.backbone.get_buffer(name).roll(1, -1), persistent=False
        )


def rope_that_begins_anew_in_every_chunk(model: StreamModel) -> None:
    """Positions themselves do not matter, only their distances."""
    rope = model.backbone.rope
    model.backbone.rope = lambda positions: rope(positions - positions[..., :1])  # type: ignore[method-assign]


def a_linear_off_by_a_tenth_of_a_percent(model: StreamModel) -> None:
    layer(model).mlp.down_proj.weight.data *= 1.001


def a_bias_that_is_missing(model: StreamModel) -> None:
    layer(model).self_attn.v_proj.bias.data.zero_()


def one_token_of_the_head(model: StreamModel) -> None:
    model.backbone.lm_head.weight = nn.Parameter(model.backbone.lm_head.weight.clone())
    model.backbone.lm_head.weight.data[7] *= 1.01


def attention_without_its_scale(model: StreamModel) -> None:
    layer(model).self_attn.scaling *= 1.02


def a_norm_that_is_not_a_number(model: StreamModel) -> None:
    model.backbone.norm.weight.data[0] = torch.nan


FAULTS: list[Callable[[StreamModel], None]] = [
    swapped_layers,
    rope_without_its_factor,
    rope_of_other_channels,
    rope_that_begins_anew_in_every_chunk,
    a_linear_off_by_a_tenth_of_a_percent,
    a_bias_that_is_missing,
    one_token_of_the_head,
    attention_without_its_scale,
    a_norm_that_is_not_a_number,
]


@pytest.mark.parametrize("plant", FAULTS)
def test_a_fault_is_refused(plant: Callable[[StreamModel], None]) -> None:
    hf = tiny_model("llama")
    model = build(copy.deepcopy(hf), None, 64).eval()
    plant(model)
    with pytest.raises(
        ParityError, match=r"my model: the logits at token \d+ of a text of 40 differ"
    ):
        compare_logits(model, expected_of(hf), "my model")


def test_an_answer_that_is_not_the_likeliest_is_refused() -> None:
    hf = tiny_model("llama")
    expected = expected_of(hf)
    chosen = list(expected.chosen or ())
    chosen[4] = int(expected.logits[4].argmin())
    with pytest.raises(ParityError, match=rf"gives token {chosen[4]} as number 5 of its answer"):
        compare_logits(build(hf, None, 64).eval(), expected._replace(chosen=chosen), "my model")
