"""Faults of exports, each in a single layer of a deep artifact; ``(artifact, layer) -> None``
plants one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ssdevice.contract import COUNT, NEXT_DRAFTS, ROWS, STEP
from ssdevice.model.streams import StreamRowAdapter
from tests.export.deep import Artifact

Fault = Callable[[Artifact, int], None]
FAULTS: dict[str, Fault] = {}


def fault(plant: Fault) -> Fault:
    """Enter a fault under its name."""
    FAULTS[plant.__name__.replace("_", "-")] = plant
    return plant


def linear(artifact: Artifact, layer: int, path: str) -> nn.Linear:
    """A linear of a layer, without a stream adapter around it."""
    part = artifact.model.backbone.layers[layer].get_submodule(path)
    return part.base if isinstance(part, StreamRowAdapter) else part  # type: ignore[return-value]


def change_inputs(artifact: Artifact, layer: int, **changes: Callable[[Any], Any]) -> None:
    """Give a layer other keyword arguments than the model does."""

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, **{name: change(kwargs[name]) for name, change in changes.items()}}

    artifact.model.backbone.layers[layer].register_forward_pre_hook(before, with_kwargs=True)


@fault
def a_scale_off_by_2_percent(artifact: Artifact, layer: int) -> None:
    linear(artifact, layer, "mlp.down_proj").weight.data *= 1.02


@fault
def one_column_off_by_2_percent(artifact: Artifact, layer: int) -> None:
    linear(artifact, layer, "mlp.up_proj").weight.data[7] *= 1.02


@fault
def two_swapped_layers(artifact: Artifact, layer: int) -> None:
    layers = artifact.model.backbone.layers
    mine = layers[layer]
    other = layers[layer + 1]
    for one, two in zip(mine.parameters(), other.parameters(), strict=True):
        one.data, two.data = two.data, one.data


@fault
def a_stale_norm(artifact: Artifact, layer: int) -> None:
    layers = artifact.model.backbone.layers
    layers[layer].post_attention_layernorm.weight.data = layers[
        layer - 1
    ].post_attention_layernorm.weight.data


@fault
def rope_off_by_one(artifact: Artifact, layer: int) -> None:
    ((one_cos, one_sin),) = artifact.model.backbone.rope(
        torch.ones(1, 1, dtype=torch.int32)
    ).tables.values()

    def turned(rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = rope
        return cos * one_cos - sin * one_sin, sin * one_cos + cos * one_sin

    change_inputs(artifact, layer, position_embeddings=turned)


@fault
def mask_off_by_one(artifact: Artifact, layer: int) -> None:
    """The oldest row is not seen."""

    def blind(mask: Tensor) -> Tensor:
        mask = mask.clone()
        mask[..., 0] = mask.min()
        return mask

    change_inputs(artifact, layer, attention_mask=blind)


@fault
def rows_see_the_next_one(artifact: Artifact, layer: int) -> None:
    def leaking(mask: Tensor) -> Tensor:
        return (
            torch.cat([mask[..., 1:, :], mask[..., -1:, :]], dim=-2) if mask.shape[-2] > 1 else mask
        )

    change_inputs(artifact, layer, attention_mask=leaking)


@fault
def attention_scaled_by_2_percent(artifact: Artifact, layer: int) -> None:
    artifact.model.backbone.layers[layer].self_attn.scaling *= 1.02


@fault
def a_wrong_zero_point(artifact: Artifact, layer: int) -> None:
    """Every input is one of 127 levels too high."""
    part = linear(artifact, layer, "mlp.up_proj")
    part.register_forward_pre_hook(lambda _, x: (x[0] + x[0].abs().amax(-1, keepdim=True) / 127,))


@fault
def saturating_products(artifact: Artifact, layer: int) -> None:
    """Pairs of products are summed in 16 bits, as ``vpmaddubsw`` does without VNNI."""
    part = linear(artifact, layer, "mlp.down_proj")

    def saturated(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        x = inputs[0].reshape(-1, part.in_features)
        rows = x.abs().amax(-1, keepdim=True) / 127
        columns = part.weight.abs().amax(-1) / 127
        codes = torch.round(x / rows) + 128
        weights = torch.round(part.weight / columns[:, None])
        pairs = codes.reshape(len(x), 1, -1, 2) * weights.reshape(1, len(weights), -1, 2)
        sums = pairs.sum(-1).clamp(-32768, 32767).sum(-1) - 128 * weights.sum(-1)
        return (sums * rows * columns).reshape(output.shape)

    part.register_forward_hook(saturated)


@fault
def a_weight_of_another_layer(artifact: Artifact, layer: int) -> None:
    linear(artifact, layer, "self_attn.k_proj").weight.data = linear(
        artifact, layer - 1, "self_attn.k_proj"
    ).weight.data


@fault
def a_transposed_square_matrix(artifact: Artifact, layer: int) -> None:
    weight = linear(artifact, layer, "self_attn.o_proj").weight
    weight.data = weight.data.T.contiguous()


@fault
def key_heads_in_another_order(artifact: Artifact, layer: int) -> None:
    for path in ("self_attn.k_proj", "self_attn.v_proj"):
        weight = linear(artifact, layer, path).weight
        weight.data = weight.data.reshape(2, -1, weight.shape[1]).flip(0).reshape(weight.shape)


@fault
def another_activation(artifact: Artifact, layer: int) -> None:
    artifact.model.backbone.layers[layer].mlp.act_fn = nn.GELU()


@fault
def a_missing_residual(artifact: Artifact, layer: int) -> None:
    mlp = artifact.model.backbone.layers[layer].mlp
    mlp.register_forward_hook(lambda _, __, out: out * 0.98)


@fault
def an_adapters_scaling_twice(artifact: Artifact, _: int) -> None:
    last = artifact.model.backbone.layers[-1].get_submodule("self_attn.q_proj")
    assert isinstance(last, StreamRowAdapter)
    last.adapter.up.weight.data *= 2


@fault
def a_stream_identifier_swapped(artifact: Artifact, _: int) -> None:
    assert artifact.model.streams is not None
    identifiers = artifact.model.streams.identifiers
    identifiers.data = identifiers.data.flip(0)


@fault
def a_stale_last_norm(artifact: Artifact, _: int) -> None:
    artifact.model.backbone.norm.weight.data *= 1 + 0.05 * torch.randn(
        artifact.model.backbone.norm.weight.shape
    )


@fault
def candidates_in_another_order(artifact: Artifact, _: int) -> None:
    def swap(__: str, out: dict[str, Any]) -> None:
        if NEXT_DRAFTS in out:
            out[NEXT_DRAFTS] = out[NEXT_DRAFTS][:, ::-1]

    artifact.spoil = swap


@fault
def cache_rows_one_off(artifact: Artifact, layer: int) -> None:
    def shift(_: str, out: dict[str, Any]) -> None:
        rows = out[ROWS]
        if rows.shape[1] > 1:
            rows[2 * layer, 1:] = rows[2 * layer, :-1].copy()

    artifact.spoil = shift


@fault
def keys_and_values_swapped(artifact: Artifact, layer: int) -> None:
    def swap(_: str, out: dict[str, Any]) -> None:
        out[ROWS][2 * layer : 2 * layer + 2] = out[ROWS][2 * layer : 2 * layer + 2][::-1].copy()

    artifact.spoil = swap


@fault
def one_token_too_many(artifact: Artifact, _: int) -> None:
    def count(function: str, out: dict[str, Any]) -> None:
        if function == STEP and int(out[COUNT][0]) == 1:
            out[COUNT] = out[COUNT] + 1

    artifact.spoil = count
