"""A Hugging Face decoder split into embedding, layers and head.

The layers themselves run unchanged.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ssdevice.errors import ContextOverflowError, UnsupportedModelError
from ssdevice.model import attention
from ssdevice.model.attention import Context, KeyValue, Rows
from ssdevice.model.families import Family, Sliding, family_of
from ssdevice.model.operators import Operators
from ssdevice.model.visibility import additive

Masks = dict[int | None, Tensor]
"""Additive masks ``[B or 1, 1, R, rows]`` by attention window."""


@dataclass(frozen=True)
class Rope:
    """``positions [B, R]`` of rows, and their cos and sin ``[B, R, rotary dim]`` by rotary kind."""

    positions: Tensor
    tables: dict[str, tuple[Tensor, Tensor]]


class Backbone(nn.Module):
    """The decoder of a Hugging Face causal language model, callable layer by layer with explicit
    rows and masks.

    ``positions``: size of the position tables. Raises UnsupportedModelError for a model that a
    static step cannot express, ContextOverflowError if the model's own tables are shorter than
    ``context``.
    """

    position_table: Tensor

    def __init__(self, hf: Any, context: int, positions: int) -> None:
        super().__init__()
        self.config = config = hf.config
        self.family = family = family_of(config.model_type)
        for key, values in family.refuse.items():
            if getattr(config, key, values[0]) not in values:
                what = f"{config.model_type} with {key} = {getattr(config, key)} is not supported"
                raise UnsupportedModelError(f"{what}, only with {values[-1]}")
        decoder = hf.get_submodule(family.decoder)
        config._attn_implementation = attention.NAME
        self.embed_tokens = getattr(decoder, family.embed)
        self.layers = nn.ModuleList(getattr(decoder, family.layers))
        self.num_layers = len(self.layers)
        self.norm = getattr(decoder, family.norm, None) or nn.Identity()
        self.lm_head = hf.get_output_embeddings()
        _tie_if_equal(self.embed_tokens, self.lm_head)
        # Only OPT has these, and only where its embeddings are narrower than its layers.
        self.project_in = getattr(decoder, "project_in", None) or nn.Identity()
        self.project_out = getattr(decoder, "project_out", None) or nn.Identity()
        self.layer_types = _layer_types(config, family, self.num_layers)
        self.operators = Operators()
        self._make_tables(decoder, context, positions)

    def _make_tables(self, decoder: Any, context: int, positions: int) -> None:
        """Register the position tables: cos/sin per rotary kind, or the learned table's rows."""
        family = self.family
        self._rope_kinds = sorted(set(self.layer_types)) if family.rotary_by_layer_type else [""]
        if family.position_embedding is not None:
            table = getattr(decoder, family.position_embedding).weight[family.position_offset :]
            if context > len(table):
                raise ContextOverflowError(
                    f"context {context} is longer than the model's {len(table)} positions"
                )
            rows = torch.arange(positions).clamp(max=len(table) - 1)
            self.register_buffer("position_table", table.detach()[rows].clone(), persistent=False)
        if family.rotary is None:
            self._rope_kinds = []
            return
        rotary = getattr(decoder, family.rotary)
        where = torch.arange(positions)
        if (fixed := _positions_of_one_rope(self.config, rotary)) is not None:
            if context > fixed:
                kinds = ", ".join(sorted(set(_rope_types(rotary).values())))
                what = f"the rotary embedding changes with the length beyond {fixed} positions (rope type {kinds})"
                raise UnsupportedModelError(
                    f"{what}: export with a context of at most {fixed}, not {context}"
                )
            where = where.clamp(max=context - 1)
        if where.is_meta:  # a plan has no values, at which some rotary embeddings look
            return
        probe = torch.zeros(1, dtype=torch.float32)
        for name in self._rope_kinds:
            cos, sin = rotary(probe, where[None], *([name] if name else []))
            self.register_buffer(f"rope_cos_{name}", cos[0].float(), persistent=False)
            self.register_buffer(f"rope_sin_{name}", sin[0].float(), persistent=False)

    @property
    def mask_value(self) -> float:
        """What is added to the score of a row that is not seen."""
        return self.operators.mask_value

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; several heads of queries may share one."""
        return int(
            getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        )

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        config = self.config
        return int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states ``[B, R, D]`` of tokens and positions ``[B, R]``."""
        h: Tensor = self.project_in(self.embed_tokens(tokens))
        if self.family.embed_scale is not None:
            h = h * getattr(self.config, self.family.embed_scale)
        if self.family.position_embedding is not None:
            h = h + nn.functional.embedding(positions, self.position_table)
        return h

    def rope(self, positions: Tensor) -> Rope:
        """The rotary embedding of rows at positions ``[B, R]``."""
        read = nn.functional.embedding
        rows = {
            name: (read(positions, cos), read(positions, sin))
            for name, (cos, sin) in self.rope_tables().items()
        }
        return Rope(positions, rows)

    def rope_tables(self) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin ``[positions, rotary dim]`` by rotary kind."""
        read = self.get_buffer
        return {
            name: (read(f"rope_cos_{name}"), read(f"rope_sin_{name}")) for name in self._rope_kinds
        }

    def run(
        self,
        first: int,
        last: int,
        h: Tensor,
        rope: Rope,
        masks: Masks,
        past: Context | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Layers ``first`` to ``last - 1`` on ``h [B, R, D]``: the hidden states, and each layer's
        new (keys, values).

        ``past[i]``: runs of earlier rows of layer i; None: there are none.
        """
        rows = Rows(past or [()] * len(self.layers), rope.positions, self.operators.attention)
        for i in range(first, last):
            kind = self.layer_types[i] if self.family.rotary_by_layer_type else ""
            out = self.layers[i](
                h,
                attention_mask=masks[self.window(i)],
                past_key_values=rows,
                position_embeddings=rope.tables.get(kind),
            )
            h = out[0] if isinstance(out, tuple) else out
        return h, [rows.new[i] for i in range(first, last)]

    def add_layer(self) -> nn.Module:
        """A copy of the last layer that sees all rows, or of the last one, as one more layer after
        all others.
        """
        index = max(
            (i for i in range(self.num_layers) if self.window(i) is None),
            default=self.num_layers - 1,
        )
        layer = copy.deepcopy(self.layers[index])
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                setattr(part, "layer_idx", len(self.layers))  # noqa: B010  # modules have no such attribute for mypy
        self.layers.append(layer)
        self.layer_types.append(self.layer_types[index])
        return layer

    def window(self, layer: int) -> int | None:
        """How many positions a row of this layer sees, including its own; None: all."""
        return (
            self.config.sliding_window if self.layer_types[layer] == "sliding_attention" else None
        )

    def windows(self) -> set[int | None]:
        """The different windows of the layers (see ``window``)."""
        return {self.window(i) for i in range(len(self.layers))}

    def masks(self, visible: Callable[[int | None], Tensor]) -> Masks:
        """The masks of all layers; ``visible``: which rows see which within a window, ``[B or 1, 1,
        R, rows]`` bool.
        """
        return {window: additive(visible(window), self.mask_value) for window in self.windows()}

    def finish(self, h: Tensor) -> Tensor:
        """What the LM head reads, ``[.., W]``, of final hidden states ``[.., D]``."""
        return cast(Tensor, self.project_out(self.norm(h)))

    def head(self, h: Tensor) -> Tensor:
        """Logits ``[.., V]`` of final hidden states ``[.., D]``."""
        return self.logits(self.finish(h))

    def head_rows(self, ids: Tensor) -> nn.Linear:
        """A copy of the LM head for the tokens ``ids [n]``, ``[.., W] -> [.., n]``, with frozen
        weights.
        """
        whole = self.lm_head
        rows = nn.Linear(whole.in_features, len(ids), whole.bias is not None, device="meta")
        rows.weight = nn.Parameter(whole.weight.detach()[ids].clone(), requires_grad=False)
        if whole.bias is not None:
            rows.bias = nn.Parameter(whole.bias.detach()[ids].clone(), requires_grad=False)
        return rows

    def logits(self, finished: Tensor, head: nn.Module | None = None) -> Tensor:
        """Logits ``[.., n]`` of ``finished [.., W]`` states through a ``head`` for n tokens; None:
        the LM head.
        """
        config = self.config
        family = self.family
        logits: Tensor = (self.lm_head if head is None else head)(finished)
        if family.logit_scale is not None:
            logits = logits * getattr(config, family.logit_scale)
        if family.logit_divisor is not None:
            logits = logits / getattr(config, family.logit_divisor)
        cap = getattr(config, family.logit_softcap) if family.logit_softcap is not None else None
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def _tie_if_equal(embedding: nn.Embedding, head: nn.Module) -> None:
    """Let a head share the embedding's weights if they are equal: some converters store equal
    constants only once.
    """
    ours = embedding.weight
    theirs = getattr(head, "weight", None)
    if (
        ours is theirs or theirs is None or ours.shape != theirs.shape or ours.is_meta
    ):  # without values in a plan
        return
    middle = len(ours) // 2  # rows of mapped weights are read from a file
    if torch.equal(ours[middle], theirs[middle]) and torch.equal(ours, theirs):
        head.weight = ours


def _layer_types(config: Any, family: Family, layers: int) -> list[str]:
    """``full_attention`` or ``sliding_attention`` of each layer, as the family's own forward reads
    its config.
    """
    types = getattr(config, "layer_types", None) or []
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        what = (
            f"{config.model_type} with layers of type {', '.join(sorted(unknown))} is not supported"
        )
        raise UnsupportedModelError(
            f"{what}: every layer must be full_attention or sliding_attention"
        )
    if family.sliding is Sliding.BY_LAYER_TYPE:
        return list(types)
    slides = family.sliding is Sliding.ALWAYS and config.sliding_window is not None
    return ["sliding_attention" if slides else "full_attention"] * layers


def _rope_types(rotary: Any) -> dict[str, str]:
    """By layer type, or one for all layers under an empty name."""
    return rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}


def _positions_of_one_rope(config: Any, rotary: Any) -> int | None:
    """The length up to which a rotary embedding stays the same; None: it does not depend on the
    length.
    """
    limits = []
    for name, kind in _rope_types(rotary).items():
        if kind == "dynamic":
            limits.append(int(config.max_position_embeddings))
        elif kind == "longrope":
            parameters = config.rope_parameters[name] if name else config.rope_parameters
            limits.append(int(parameters["original_max_position_embeddings"]))
    return min(limits, default=None)
