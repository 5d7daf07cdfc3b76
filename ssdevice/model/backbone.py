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
    """The decoder of a Hugging Face causal language model, to be called layer by layer.

    Rows and masks are explicit. ``positions``: size of the position tables. Raises
    UnsupportedModelError for a model that a static step cannot express, ContextOverflowError if the
    model's own tables are shorter than ``context``.
    """

    position_table: Tensor

    def __init__(self, hf: Any, context: int, positions: int) -> None:
        super().__init__()
        config = hf.config
        family = family_of(config.model_type)
        self.config = config
        self.family = family
        for key, values in family.refuse.items():
            found = getattr(config, key, values[0])
            if found not in values:
                raise UnsupportedModelError(
                    f"{config.model_type} with {key} = {found} is not supported, "
                    f"only with {values[-1]}"
                )
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
        """Register the position tables: cos and sin by rotary kind, or rows of a learned table."""
        family = self.family
        if family.position_embedding is not None:
            table = getattr(decoder, family.position_embedding).weight[family.position_offset :]
            if context > len(table):
                raise ContextOverflowError(
                    f"context {context} is longer than the model's {len(table)} positions"
                )
            rows = torch.arange(positions).clamp(max=len(table) - 1)
            self.register_buffer("position_table", table.detach()[rows].clone(), persistent=False)
        self._rope_kinds = list[str]()
        if family.rotary is not None:
            rotary = getattr(decoder, family.rotary)
            if family.rotary_by_layer_type:
                self._rope_kinds = sorted(set(self.layer_types))
            else:
                self._rope_kinds = [""]
            self._make_rope_tables(rotary, context, positions)

    def _make_rope_tables(self, rotary: Any, context: int, positions: int) -> None:
        """Register cos and sin by rotary kind."""
        where = torch.arange(positions)
        fixed = _positions_of_one_rope(self.config, rotary)
        if fixed is not None:
            if context > fixed:
                kinds = ", ".join(sorted(set(_rope_types(rotary).values())))
                raise UnsupportedModelError(
                    f"the rotary embedding changes with the length beyond {fixed} positions "
                    f"(rope type {kinds}): export with a context of at most {fixed}, not {context}"
                )
            where = where.clamp(max=context - 1)
        if where.is_meta:  # a plan has no values, at which some rotary embeddings look
            return
        probe = torch.zeros(1, dtype=torch.float32)
        for name in self._rope_kinds:
            layer_type = [name] if name else []
            cos, sin = rotary(probe, where[None], *layer_type)
            self.register_buffer(f"rope_cos_{name}", cos[0].float(), persistent=False)
            self.register_buffer(f"rope_sin_{name}", sin[0].float(), persistent=False)

    @property
    def mask_value(self) -> float:
        """What is added to the score of a row that is not seen."""
        return self.operators.mask_value

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; several heads of queries may share one."""
        own = getattr(self.config, "num_key_value_heads", None)
        return int(own or self.config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        config = self.config
        own = getattr(config, "head_dim", None)
        return int(own or config.hidden_size // config.num_attention_heads)

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
        rows_at = nn.functional.embedding
        rows = {
            name: (rows_at(positions, cos), rows_at(positions, sin))
            for name, (cos, sin) in self.rope_tables().items()
        }
        return Rope(positions, rows)

    def rope_tables(self) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin ``[positions, rotary dim]`` by rotary kind."""
        tables = dict[str, tuple[Tensor, Tensor]]()
        for name in self._rope_kinds:
            cos = self.get_buffer(f"rope_cos_{name}")
            sin = self.get_buffer(f"rope_sin_{name}")
            tables[name] = (cos, sin)
        return tables

    def run(
        self,
        first: int,
        last: int,
        h: Tensor,
        rope: Rope,
        masks: Masks,
        past: Context | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Layers ``first`` to ``last - 1`` on ``h [B, R, D]``.

        ``past[i]``: runs of earlier rows of layer i; None: there are none. Returns the hidden
        states, and each layer's new (keys, values).
        """
        if not past:
            past = [()] * len(self.layers)
        rows = Rows(past, rope.positions, self.operators.attention)
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
        """One more layer after all others: a copy of the last one, of those that see all rows.

        If no layer sees all rows, it is a copy of the last one.
        """
        unbounded = [i for i in range(self.num_layers) if self.window(i) is None]
        index = max(unbounded, default=self.num_layers - 1)
        layer = copy.deepcopy(self.layers[index])
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                cast(Any, part).layer_idx = len(self.layers)
        self.layers.append(layer)
        self.layer_types.append(self.layer_types[index])
        return layer

    def window(self, layer: int) -> int | None:
        """How many positions a row of this layer sees, including its own; None: all."""
        window: int | None = None
        if self.layer_types[layer] == "sliding_attention":
            window = self.config.sliding_window
        return window

    def windows(self) -> set[int | None]:
        """The different windows of the layers (see ``window``)."""
        return {self.window(i) for i in range(len(self.layers))}

    def masks(self, visible: Callable[[int | None], Tensor]) -> Masks:
        """The masks of all layers.

        ``visible``: which rows see which within a window, ``[B or 1, 1, R, rows]`` bool.
        """
        return {window: additive(visible(window), self.mask_value) for window in self.windows()}

    def finish(self, h: Tensor) -> Tensor:
        """What the LM head reads, ``[.., W]``, of final hidden states ``[.., D]``."""
        return cast(Tensor, self.project_out(self.norm(h)))

    def head(self, h: Tensor) -> Tensor:
        """Logits ``[.., V]`` of final hidden states ``[.., D]``."""
        return self.logits(self.finish(h))

    def head_rows(self, ids: Tensor) -> nn.Linear:
        """A frozen copy of the LM head for the tokens ``ids [n]``: ``[.., W] -> [.., n]``."""
        whole = self.lm_head
        rows = nn.Linear(whole.in_features, len(ids), whole.bias is not None, device="meta")
        rows.weight = nn.Parameter(whole.weight.detach()[ids].clone(), requires_grad=False)
        if whole.bias is not None:
            rows.bias = nn.Parameter(whole.bias.detach()[ids].clone(), requires_grad=False)
        return rows

    def logits(self, finished: Tensor, head: nn.Module | None = None) -> Tensor:
        """Logits of ``finished [.., W]`` states through a ``head`` for n tokens, ``[.., n]``.

        ``head`` None: the LM head.
        """
        config = self.config
        family = self.family
        if head is None:
            head = self.lm_head
        logits: Tensor = head(finished)
        if family.logit_scale is not None:
            logits = logits * getattr(config, family.logit_scale)
        if family.logit_divisor is not None:
            logits = logits / getattr(config, family.logit_divisor)
        if family.logit_softcap is not None:
            cap = getattr(config, family.logit_softcap)
            if cap is not None:
                logits = torch.tanh(logits / cap) * cap
        return logits


def _tie_if_equal(embedding: nn.Embedding, head: nn.Module) -> None:
    """Let a head share the embedding's weights if they are equal.

    Some converters store equal constants only once.
    """
    ours = embedding.weight
    theirs = getattr(head, "weight", None)
    if theirs is None or ours is theirs or ours.shape != theirs.shape:
        return
    if ours.is_meta:  # a plan has no values
        return
    # One row is compared first, because mapped weights are read from a file.
    middle = len(ours) // 2
    if torch.equal(ours[middle], theirs[middle]) and torch.equal(ours, theirs):
        head.weight = ours


def _layer_types(config: Any, family: Family, layers: int) -> list[str]:
    """``full_attention`` or ``sliding_attention`` of each layer, as its family reads the config."""
    types = getattr(config, "layer_types", None) or []
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"{config.model_type} with layers of type {', '.join(sorted(unknown))} "
            "is not supported: every layer must be full_attention or sliding_attention"
        )
    if family.sliding is Sliding.BY_LAYER_TYPE:
        return list(types)
    slides = family.sliding is Sliding.ALWAYS and config.sliding_window is not None
    return ["sliding_attention" if slides else "full_attention"] * layers


def _rope_types(rotary: Any) -> dict[str, str]:
    """The rope types by layer type, or one for all layers under an empty name."""
    if isinstance(rotary.rope_type, dict):
        return rotary.rope_type
    return {"": rotary.rope_type}


def _positions_of_one_rope(config: Any, rotary: Any) -> int | None:
    """The length up to which a rotary embedding stays the same; None: at all lengths."""
    limits = []
    for name, kind in _rope_types(rotary).items():
        if kind == "dynamic":
            limits.append(int(config.max_position_embeddings))
        elif kind == "longrope":
            parameters = config.rope_parameters[name] if name else config.rope_parameters
            limits.append(int(parameters["original_max_position_embeddings"]))
    return min(limits, default=None)
