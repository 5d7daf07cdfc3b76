"""Drafters of other papers on the final states of a frozen base: BPD, Medusa-1, Hydra, Hydra++ and EAGLE.

After a row at position t the base has a state h_t, what its LM head reads, and has chosen the token x_{t+1}. Guess j
(from 0) of that row is for x_{t+j+2}, as stream j + 1 guesses. All of them train in one pass over states of the
untouched base, with the product's rows, masks and draft vocabulary. They draft one chain: no trees, so no top-k.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, silu, smooth_l1_loss

from ssdevice.model.attention import KeyValue
from ssdevice.model.backbone import Backbone, Masks
from ssdevice.model.visibility import causal
from ssdevice.train.batches import Batch
from ssdevice.train.loss import IGNORE, completion_rows, targets


class Main(NamedTuple):
    """What the base has in every row: the ``states [B, S, D]`` that its LM head reads, what enters its layers and
    leaves the last (L + 1 times ``[B, S, D]``), and each layer's keys and values."""

    states: Tensor
    layers: Sequence[Tensor]
    rows: Sequence[KeyValue]


class Base:
    """The frozen model under all drafters. It is no module, so that no drafter has its weights.

    ``ids [n]``: the draft vocabulary, ascending; None: all tokens.
    """

    def __init__(self, backbone: Backbone, gamma: int, ids: Tensor | None = None) -> None:
        self.backbone, self.gamma = backbone.requires_grad_(False), gamma
        self.width = int(backbone.config.hidden_size)
        self.head = cast(nn.Linear, backbone.lm_head) if ids is None else backbone.head_rows(ids)
        self.place = torch.arange(int(backbone.config.vocab_size))  # token -> its row of the head
        if ids is not None:
            self.place.fill_(IGNORE)[ids] = torch.arange(len(ids))

    @torch.no_grad()
    def main(self, tokens: Tensor) -> Main:
        """The rows of ``tokens [B, S]``."""
        positions, masks = self.causal(tokens.shape[1])
        backbone, rope = self.backbone, self.backbone.rope(positions)
        layers, rows = [backbone.embed(tokens, positions.expand(len(tokens), -1))], list[KeyValue]()
        for i in range(backbone.num_layers):
            h, row = backbone.run(i, i + 1, layers[-1], rope, masks)
            layers.append(h)
            rows += row
        return Main(backbone.finish(layers[-1]).float(), layers, rows)

    def causal(self, width: int) -> tuple[Tensor, Masks]:
        """Positions ``[1, S]`` of whole sequences, and their masks."""
        positions = torch.arange(width, dtype=torch.int32)
        return positions[None], self.backbone.masks(
            lambda window: causal(positions, window)[None, None]
        )

    def embed(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Embeddings ``[B, n, D]`` of the tokens at ``at [B, n]``; any beyond the sequence."""
        return self.backbone.embed(tokens.gather(1, at.clamp(max=tokens.shape[1] - 1)), at)

    def logits(self, states: Tensor, head: nn.Module | None = None) -> Tensor:
        """Logits ``[.., n]`` over the draft vocabulary."""
        return self.backbone.logits(states, head or self.head)

    def own_head(self) -> nn.Module:
        """A copy of the LM head (of its rows of the draft vocabulary) to train."""
        return copy.deepcopy(self.head).requires_grad_(True)

    def add_layer(self) -> nn.Module:
        """One more layer of the base's class, with weights as before any training; see ``layer``."""
        layer = self.backbone.add_layer().requires_grad_(True)
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=float(self.backbone.config.initializer_range))
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
            else:
                for norm in part.parameters(recurse=False):
                    nn.init.ones_(norm)
        return layer

    def layer(
        self, layer: nn.Module, h: Tensor, at: Tensor, masks: Masks, runs: Sequence[KeyValue] = ()
    ) -> tuple[Tensor, KeyValue]:
        """An added layer on rows ``h [B, n, D]`` at ``at`` after ``runs`` of earlier rows; also their new row."""
        index = list(self.backbone.layers).index(layer)
        past = [*[()] * index, list(runs)]
        h, (row,) = self.backbone.run(index, index + 1, h, self.backbone.rope(at), masks, past)
        return h, row

    def ahead(self, batch: Batch, nodes: Tensor) -> Tensor:
        """``[B, n, γ]``: the row of the head that each guess of ``nodes [B, n]`` should choose, or IGNORE."""
        wanted = torch.stack(
            [targets(batch.tokens, nodes, batch.lengths, j + 2) for j in range(self.gamma)], dim=-1
        )
        return torch.where(wanted == IGNORE, IGNORE, self.place[wanted.clamp(min=0)])


def rows_at(states: Tensor, at: Tensor) -> Tensor:
    """``[B, S, D]`` and ``[B, n]`` to ``[B, n, D]``; the last row for what is beyond it."""
    at = at.clamp(max=states.shape[1] - 1)
    return states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))


def means(each: Tensor, ahead: Tensor) -> Tensor:
    """Means ``[γ]`` of losses ``[B, n, γ]`` over what is not IGNORE in ``ahead``."""
    keep = ahead != IGNORE
    return (each * keep).sum((0, 1)) / keep.sum((0, 1)).clamp(min=1)


def losses(logits: Tensor, ahead: Tensor) -> Tensor:
    """Cross entropy in nats, ``[B, n, γ, V]`` and ``[B, n, γ]`` to ``[B, n, γ]``; 0 for IGNORE."""
    each = cross_entropy(
        logits.float().flatten(0, 2), ahead.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return each.view_as(ahead)


def taught(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy in nats with the probabilities of ``teacher``, both ``[.., V]``."""
    return -(torch.softmax(teacher.float(), -1) * torch.log_softmax(logits.float(), -1)).sum(-1)


class Drafter(nn.Module):
    """``weights``: of each guess's loss, ``[γ]``; the loss of the other papers is their sum."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.base = base
        self.weights = torch.ones(base.gamma)

    def guesses(self, tokens: Tensor, main: Main, at: Tensor) -> Tensor:
        """Logits ``[B, n, γ, V]`` of the rows ``at [B, n]``.

        Guess j reads ``main`` up to its row, and of ``tokens`` those up to j + 1 after it: in training the right
        ones, in decoding those drafted. A draft counts only if those before it are right, so along the model's own
        answer both are the same.
        """
        raise NotImplementedError

    def loss(self, batch: Batch, main: Main, random: torch.Generator) -> Tensor:
        """What to make small, over the completions of ``batch``."""
        nodes = completion_rows(batch.prompts, batch.lengths)
        at, ahead = nodes.clamp(min=0), self.base.ahead(batch, nodes)
        each = self.each(self.guesses(batch.tokens, main, at), ahead, main.states, at)
        return (means(each, ahead) * self.weights).sum()

    def each(self, logits: Tensor, ahead: Tensor, states: Tensor, at: Tensor) -> Tensor:
        """The loss of every guess, ``[B, n, γ]``."""
        return losses(logits, ahead)


class BPD(Drafter):
    """Blockwise parallel decoding (1811.03115): one feed-forward layer of hidden size γ · d_hidden, whose γ outputs are
    added to the state and read by the one vocabulary projection.

    The paper's k proposals include the next token, which here the base itself chooses, for it is lossless; and its
    loss is that of one random head a step, the mean of which is trained here. Its best models are trained whole.
    """

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        inner = base.gamma * int(getattr(base.backbone.config, "intermediate_size", 4 * base.width))
        self.up, self.down = nn.Linear(base.width, inner), nn.Linear(inner, base.gamma * base.width)
        self.weights = self.weights / base.gamma

    def guesses(self, tokens: Tensor, main: Main, at: Tensor) -> Tensor:
        here = rows_at(main.states, at)
        moved = self.down(relu(self.up(here))).unflatten(-1, (self.base.gamma, -1))
        return self.base.logits(here[:, :, None] + moved)


class Block(nn.Module):
    """x -> skip(x) + SiLU(W x), with W zero at first.

    ``inputs``: how many vectors of ``width`` x has. skip is x itself, or, where x has several, linear, and at first the
    first of them.
    """

    def __init__(self, width: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * width, width)
        self.skip = nn.Linear(inputs * width, width) if inputs > 1 else nn.Identity()
        for part in (
            (self.linear, self.skip) if isinstance(self.skip, nn.Linear) else (self.linear,)
        ):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
        if isinstance(self.skip, nn.Linear):
            nn.init.eye_(self.skip.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., inputs * width] -> [.., width]``."""
        return cast(Tensor, self.skip(x)) + silu(self.linear(x))


class Medusa(Drafter):
    """Medusa-1 (2401.10774): for each guess a residual block with SiLU on the state and a head of its own, which begin
    as the identity and the LM head; the loss of guess j (from 1) counts 0.8^j.

    The paper's trees (top-k of each head) and typical acceptance are left out: a chain, greedily verified.
    """

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self.blocks = nn.ModuleList(Block(base.width) for _ in range(base.gamma))
        self.heads = nn.ModuleList(base.own_head() for _ in range(base.gamma))
        self.weights = 0.8 ** torch.arange(1, base.gamma + 1)

    def guesses(self, tokens: Tensor, main: Main, at: Tensor) -> Tensor:
        here = rows_at(main.states, at)
        pairs = zip(self.blocks, self.heads, strict=True)
        return torch.stack([self.base.logits(block(here), head) for block, head in pairs], dim=2)


class Hydra(Drafter):
    """Hydra (2402.05109): as Medusa's, but head j also reads the embeddings of the tokens before its guess: the one
    just chosen, and those drafted.

    What its first block skips with is linear, as in the authors' code, but begins as the state (theirs: at random), so
    that it begins as Medusa. The losses of all heads are added up. No trees.
    """

    depth = 1
    """Blocks of each head."""

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        width, deeper = base.width, self.depth - 1
        self.blocks = nn.ModuleList(
            nn.Sequential(Block(width, j + 2), *(Block(width) for _ in range(deeper)))
            for j in range(base.gamma)
        )
        self.heads = nn.ModuleList(base.own_head() for _ in range(base.gamma))

    def prefix(self, states: Tensor) -> Tensor:
        """What heads read of each row, ``[B, S, D]``."""
        return states

    def guesses(self, tokens: Tensor, main: Main, at: Tensor) -> Tensor:
        read, found = [rows_at(self.prefix(main.states), at)], []
        for j, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True), 1):
            read.append(self.base.embed(tokens, at + j))
            found.append(self.base.logits(block(torch.cat(read, dim=-1)), head))
        return torch.stack(found, dim=2)


class HydraPlusPlus(Hydra):
    """Hydra++ (2402.05109, section 4): Hydra whose heads read the states through one more layer with attention, have
    four blocks, and learn the base's own probabilities and not the next token.

    The norm after that layer, which the authors' code has, is left out, so that the heads begin near the LM head.
    """

    depth = 4

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self.layer = base.add_layer()

    def prefix(self, states: Tensor) -> Tensor:
        positions, masks = self.base.causal(states.shape[1])
        return self.base.layer(self.layer, states, positions, masks)[0]

    def each(self, logits: Tensor, ahead: Tensor, states: Tensor, at: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = [
                self.base.logits(rows_at(states, at + j)) for j in range(1, self.base.gamma + 1)
            ]
        return taught(logits, torch.stack(teacher, dim=2))


class Eagle(Drafter):
    """EAGLE (2401.15077): one decoder layer that makes the next state of the state and of the token after it, through a
    linear; the LM head of the base reads what it makes, and the layer goes on from that.

    As in the authors' code the layer begins untrained, without its input norm, and states are the normed ones. The loss
    is smooth L1 with the base's next state + 0.1 of the cross entropy with the base's probabilities there; states get
    uniform noise of ±0.1. Only first guesses are trained, as in the paper. Rows of accepted tokens are computed again
    with the base's own states. Its trees are left out.
    """

    NOISE, CLASSES = 0.1, 0.1

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self.fc = nn.Linear(2 * base.width, base.width)
        self.layer = base.add_layer()
        if hasattr(self.layer, "input_layernorm"):
            self.layer.input_layernorm = nn.Identity()

    def start(self, tokens: Tensor, states: Tensor, at: Tensor) -> Tensor:
        """What the layer reads of states at positions ``at [B, n]``, and of the tokens after them."""
        return cast(Tensor, self.fc(torch.cat([self.base.embed(tokens, at + 1), states], dim=-1)))

    def next_states(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, KeyValue]:
        """The state after each row, ``[B, S, D]``, and the layer's rows."""
        positions, masks = self.base.causal(states.shape[1])
        start = self.start(tokens, states, positions.long().expand(len(tokens), -1))
        return self.base.layer(self.layer, start, positions, masks)

    def guesses(self, tokens: Tensor, main: Main, at: Tensor) -> Tensor:
        made, row = self.next_states(tokens, main.states)
        runs, found = [row], [rows_at(made, at)]
        for j in range(1, self.base.gamma):
            where = at + j
            state, row = self.base.layer(
                self.layer,
                self.start(tokens, found[-1], where),
                where,
                self._masks(at, j, tokens.shape[1]),
                runs,
            )
            runs.append(row)
            found.append(state)
        return self.base.logits(torch.stack(found, dim=2))

    def _masks(self, at: Tensor, j: int, width: int) -> Masks:
        """Draft j sees the rows up to its node in its window, the drafts before it, and itself."""
        row, node = torch.arange(width), at[..., None]
        own = torch.eye(at.shape[1], dtype=torch.bool).repeat(1, j).expand(len(at), -1, -1)

        def visible(window: int | None) -> Tensor:
            seen = (row <= node) & (True if window is None else node + j - row < window)
            return torch.cat([seen, own], dim=2)[:, None]

        return self.base.backbone.masks(visible)

    def loss(self, batch: Batch, main: Main, random: torch.Generator) -> Tensor:
        states = main.states
        noise = (2 * torch.rand(states.shape, generator=random) - 1) * self.NOISE
        made, _ = self.next_states(batch.tokens, states + noise)
        nodes = completion_rows(batch.prompts, batch.lengths)
        keep = targets(batch.tokens, nodes, batch.lengths, 2) != IGNORE
        found, wanted = rows_at(made, nodes.clamp(min=0))[keep], rows_at(states, nodes + 1)[keep]
        chosen = taught(self.base.logits(found), self.base.logits(wanted)).mean()
        return smooth_l1_loss(found.float(), wanted) + self.CLASSES * chosen


RIVALS: dict[str, type[Drafter]] = {
    "BPD": BPD, "Medusa-1": Medusa, "Hydra": Hydra, "Hydra++": HydraPlusPlus, "EAGLE": Eagle,
}  # fmt: skip
