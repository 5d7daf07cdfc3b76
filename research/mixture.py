"""Mixture of Attentions for speculative decoding (2410.03804): a drafter on the keys and values of all layers.

A decoding step has verified the rows up to t; guess j (from 0) is read in row t + 1 + j, whose token is known or
drafted. Self-attention makes a row's query of the tokens up to it. Layer self-attention looks over the base's layers in
each verified row, and its mean over them is that row's key and value, which the query attends to. What that gives
stands for what enters the base's last N layers ("target layer inference"); these run on it after the verified rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, smooth_l1_loss

from research.trained import Base, Drafter, Main, rows_at, taught
from ssdevice.model.attention import MASKED, Attending, KeyValue, attend
from ssdevice.model.backbone import Masks
from ssdevice.model.visibility import additive, causal, own_streams, stream_positions
from ssdevice.train.batches import Batch
from ssdevice.train.loss import IGNORE, completion_rows, targets


class Attention(nn.Module):
    """A layer of attention and a gated MLP of size ``inner``, each after a norm, without biases.

    ``kv_heads``: of the layer's own keys and values; 0: it is given them. ``base``: its rotary embedding turns queries
    and keys.
    """

    def __init__(self, base: Base, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.dim = base.backbone.head_dim
        self.before, self.between = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.query = nn.Linear(width, heads * self.dim, bias=False)
        self.rows = nn.Linear(width, 2 * kv_heads * self.dim, bias=False) if kv_heads else None
        self.out = nn.Linear(heads * self.dim, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=float(base.backbone.config.initializer_range))

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        rows: Tensor | None = None,
        turns: tuple[KeyValue, KeyValue] | None = None,
    ) -> Tensor:
        """``x [B, n, width]`` over ``rows [B, S, 2 * kv_heads * dim]``, or its own, by ``mask [B or 1, 1, n, S]``.

        ``turns``: cos and sin ``[B or 1, n or S, dim]`` of the queries and of the rows; None: no positions.
        """
        normed = self.before(x)
        query, (keys, values) = (
            self.split(self.query(normed)),
            self.pair(self.rows(normed) if self.rows else rows),
        )
        if turns is not None:
            query, keys = turned(query, turns[0]), turned(keys, turns[1])
        none = torch.zeros(1, 1)  # only attention in a graph asks for positions
        read = attend(
            Attending(query, [keys], [values.to(keys.dtype)], mask, none, self.dim**-0.5, None)
        )
        x = x + self.out(read.flatten(2))
        y = self.between(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))

    def pair(self, rows: Tensor) -> KeyValue:
        """Keys and values ``[B, heads, S, dim]``."""
        keys, values = rows.chunk(2, -1)
        return self.split(keys), self.split(values)

    def split(self, x: Tensor) -> Tensor:
        """``[B, n, heads * dim] -> [B, heads, n, dim]``."""
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)


def turned(x: Tensor, turn: KeyValue) -> Tensor:
    """``x [B, heads, n, dim]`` at the positions of ``turn``, cos and sin; element i turns with element i + dim / 2."""
    cos, sin = (part[:, None] for part in turn)
    real, imaginary = x.chunk(2, -1)
    return (x * cos + torch.cat([-imaginary, real], -1) * sin).to(x.dtype)


class Mixture(Drafter):
    """Target layer inference 0: what the base's LM head reads, but for the norm, is drafted.

    Where the paper is silent: a verified row's key and value are the halves of the mean, at its position; the cached
    keys are read as they are, turned; weights begin as a base's do. Sizes are such that it has about EAGLE's weights,
    as there, so its MLPs are narrower beside attention than the paper's. In training a completion is cut into pieces
    of SPAN tokens at random, whose rows see the base's up to their piece's begin: one cut for all rows of a batch.
    Queries are of the right tokens, as in the paper.
    """

    UPPER, SPAN, CLASSES = 0, (5, 15), 0.1
    """N (at most all layers); the shortest and longest piece; the weight of the classes' loss beside that of states."""

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        backbone, width = base.backbone, base.width
        heads, kv, dim = (
            int(backbone.config.num_attention_heads),
            backbone.kv_heads,
            backbone.head_dim,
        )
        self.first = max(0, backbone.num_layers - self.UPPER)
        self.tokens = Attention(base, width, heads, max(1, width // (8 * dim)), width // 8)
        self.depths = Attention(base, 2 * kv * dim, 2 * kv, kv, 2 * kv * dim)
        self.across = Attention(base, width, heads, 0, width * 3 // 4)

    def turn(self, at: Tensor) -> KeyValue | None:
        """cos and sin at positions ``at [B or 1, n]``; None if the base has learned positions in its embeddings."""
        backbone = self.base.backbone
        kind = backbone.layer_types[-1] if backbone.family.rotary_by_layer_type else ""
        return backbone.rope(at).tables.get(kind)

    def queries(self, tokens: Tensor) -> Tensor:
        """What self-attention makes of the tokens up to each, ``[B, S, D]``."""
        positions = torch.arange(tokens.shape[1])
        words = self.base.embed(tokens, positions.expand(len(tokens), -1))
        mask, turn = (
            additive(causal(positions, None)[None, None], MASKED),
            self.turn(positions[None]),
        )
        return self.tokens(words, mask, turns=turn and (turn, turn))

    def memory(self, main: Main) -> Tensor:
        """The key and value of each verified row, ``[B, S, 2 * kv_heads * dim]``."""
        layers = torch.stack(
            [torch.cat(row, 1).transpose(1, 2).flatten(2) for row in main.rows], dim=2
        )
        mixed = self.depths(layers.flatten(0, 1).float(), torch.zeros(1, 1, *[layers.shape[2]] * 2))
        return mixed.mean(1).unflatten(0, layers.shape[:2])

    def drafted(
        self, tokens: Tensor, main: Main, at: Tensor, last: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What stands for the state that enters layer L - N in rows ``at [B, n]``, and for what the LM head reads.

        They see the base's rows up to ``last [B, n]``, and each other by ``own [n, n]``.
        """
        every, backbone = torch.arange(tokens.shape[1]), self.base.backbone
        at = at.clamp(max=len(every) - 1)
        query, turn = self.turn(at), self.turn(every[None])
        seen = every <= last[..., None]
        mask = additive(seen[:, None], MASKED)
        state = self.across(
            rows_at(self.queries(tokens), at), mask, self.memory(main), query and (query, turn)
        )
        if not self.UPPER:
            return state, backbone.finish(state)

        def visible(window: int | None) -> Tensor:
            near = torch.cat([every.expand(len(at), -1), at], 1)[:, None]
            both = torch.cat([seen, own.expand(len(at), -1, -1)], 2)
            return (both if window is None else both & (at[..., None] - near < window))[:, None]

        past = [[row] if i >= self.first else [] for i, row in enumerate(main.rows)]
        masks: Masks = backbone.masks(visible)
        h, _ = backbone.run(self.first, backbone.num_layers, state, backbone.rope(at), masks, past)
        return state, backbone.finish(h)

    def guesses(self, tokens: Tensor, main: Main, at: Tensor) -> Tensor:
        gamma = self.base.gamma
        rows, last = stream_positions(at, gamma), at.repeat_interleave(gamma, 1)
        _, read = self.drafted(tokens, main, rows, last, own_streams(at.shape[1], gamma))
        return self.base.logits(read).unflatten(1, (-1, gamma))

    def pieces(self, nodes: int, random: torch.Generator) -> Tensor:
        """The first node of each node's piece, ``[n]``."""
        ends = torch.randint(self.SPAN[0], self.SPAN[1] + 1, (nodes,), generator=random).cumsum(0)
        piece = torch.bucketize(torch.arange(nodes), ends, right=True)
        return torch.cat([torch.zeros(1, dtype=torch.long), ends])[piece]

    def loss(self, batch: Batch, main: Main, random: torch.Generator) -> Tensor:
        nodes = completion_rows(batch.prompts, batch.lengths)
        begin = self.pieces(nodes.shape[1], random)
        keep, at = targets(batch.tokens, nodes, batch.lengths, 2) != IGNORE, nodes.clamp(min=0) + 1
        own = (begin[:, None] == begin).tril()
        state, read = self.drafted(batch.tokens, main, at, nodes[:, begin], own)
        wanted, teacher = rows_at(main.layers[self.first], at)[keep], rows_at(main.states, at)[keep]
        chosen = taught(self.base.logits(read[keep]), self.base.logits(teacher)).mean()
        return smooth_l1_loss(state[keep].float(), wanted.float()) + self.CLASSES * chosen


class MixtureBelow(Mixture):
    """Target layer inference 1: the base's last layer runs on drafts."""

    UPPER = 1


class MixtureFurtherBelow(Mixture):
    """Target layer inference 3."""

    UPPER = 3


MIXTURES: dict[str, type[Drafter]] = {
    "MoA TLI 0": Mixture, "MoA TLI 1": MixtureBelow, "MoA TLI 3": MixtureFurtherBelow,
}  # fmt: skip
