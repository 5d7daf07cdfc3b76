"""The Speculative Streaming loss (2402.11131 eq. 5).

Main rows predict the next token, streams the γ tokens after it. Streams start at the last prompt
token, whose main row predicts the first completion token.

Streams run in segments of completion tokens (*Speculative Streaming: Efficient and Scalable
Speculative Decoding with Multi-Stream Attention*, appendix I), so that the memory for them does not
grow with γ times the sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ssdevice.model.attention import Attending, KeyValue
from ssdevice.model.backbone import Masks
from ssdevice.model.step import Past, Rows, StreamModel
from ssdevice.model.visibility import additive, causal, own_streams, stream_positions
from ssdevice.train.options import LossWeights

IGNORE = -100
Main = tuple[Tensor, Tensor | None, Rows]
"""What ``StreamingLoss.run_main`` gives; None in place of final states that no stream needs."""


class StreamingLoss(nn.Module):
    """``forward`` returns the weighted loss, and the mean loss of each stream ``[1 + γ]``.

    Losses are means over the predicted tokens of their stream, in nats; the weighted one is a sum
    over these tokens if the weights are ``summed``. Streams do not predict tokens outside the draft
    vocabulary. Main rows run without gradients if α0 = 0.

    ``nodes``: how many nodes of a batch run their streams in one pass. A larger batch is recomputed
    segment by segment in the backward pass. ``place [V]``: the row of each token in the streams'
    head; IGNORE outside the draft vocabulary.
    """

    place: Tensor

    def __init__(self, model: StreamModel, weights: LossWeights, nodes: int = 2048) -> None:
        super().__init__()
        self.model = model
        self.weights = weights
        self.nodes = nodes
        place = torch.arange(int(model.backbone.config.vocab_size))
        if model.streams is not None and model.streams.config.draft_vocabulary:
            ids = model.streams.draft_ids.to(place.device)
            place.fill_(IGNORE)[ids] = torch.arange(len(ids))
        self.register_buffer("place", place, persistent=False)

    def forward(
        self,
        tokens: Tensor,
        prompts: Tensor,
        lengths: Tensor,
        counts: Tensor | None = None,
        known: Main | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``tokens [B, S]``, ``prompts [B]``, ``lengths [B]`` as in Batch.

        ``counts [1 + γ]``: divisors of the sums, if this batch is part of a larger one (see the
        method ``counts``). ``known``: the result of ``run_main``, if α0 = 0 and it exists already;
        final states only if streams learn from them.
        """
        nodes = completion_rows(prompts, lengths)
        if counts is None:
            counts = self.counts(tokens, prompts, lengths)
        main = counts.new_zeros(())
        if known is not None and not self.weights.main:
            read, final, rows = known
        else:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.weights.main > 0):
                read, final, rows = self.run_main(tokens)
            if self.weights.main:
                main = self._main_loss(final, tokens, nodes, lengths)
        streams = main.new_zeros(2, self.model.gamma)
        if self.model.streams is not None and self.weights.stream:
            states, rows = self.run_own(read, rows)
            taught_by = final if self.weights.soft else None
            streams = self._stream_losses(states, taught_by, nodes, tokens, lengths, rows)
        sums = torch.cat([main.expand(2, 1), streams], dim=1)
        means = sums / counts.clamp(min=1)
        weighted = (sums if self.weights.summed else means)[0]
        plain = means[1].detach()
        alpha = torch.full_like(counts, self.weights.stream)
        alpha[0] = self.weights.main
        return (alpha * weighted).sum(), plain

    def _stream_losses(
        self,
        states: Tensor,
        final: Tensor | None,
        nodes: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        rows: Past,
    ) -> Tensor:
        """``_segment`` over all nodes, a part of them at a time."""
        sums = states.new_zeros(2, self.model.gamma, dtype=torch.float32)
        segments = torch.split(nodes, max(1, self.nodes // len(nodes)), dim=1)
        for part in segments:
            arguments = (states, final, part, tokens, lengths, rows)
            if len(segments) > 1 and torch.is_grad_enabled():
                sums = sums + checkpoint(self._segment, *arguments, use_reentrant=False)
            else:
                sums = sums + self._segment(*arguments)
        return sums

    def counts(self, tokens: Tensor, prompts: Tensor, lengths: Tensor) -> Tensor:
        """How many tokens main rows and each stream predict in a batch, ``[1 + γ]`` float32."""
        nodes = completion_rows(prompts, lengths)
        main = (targets(tokens, nodes, lengths, 1) != IGNORE).sum()[None]
        streams = (self.ahead(tokens, nodes, lengths) != IGNORE).sum((0, 1))
        return torch.cat([main, streams]).float()

    def ahead(self, tokens: Tensor, nodes: Tensor, lengths: Tensor) -> Tensor:
        """``[B, n, γ]``: the row of the streams' head that each stream of each node should choose.

        IGNORE where there is none.
        """
        gamma = self.model.gamma
        if not gamma:
            return tokens.new_zeros(*nodes.shape, 0)
        ahead = torch.stack([targets(tokens, nodes, lengths, j + 2) for j in range(gamma)], dim=-1)
        return torch.where(ahead == IGNORE, IGNORE, self.place[ahead.clamp(min=0)])

    def run_main(self, tokens: Tensor) -> tuple[Tensor, Tensor, Rows]:
        """The main rows of whole sequences ``tokens [B, S]``.

        Returns what drafts read of them, ``[B, S, n D]`` (n is 1 but for own layers), final states
        ``[B, S, D]``, and the new rows of the MSA layers.
        """
        model = self.model
        positions, masks = self._causal(tokens)
        h = model.backbone.embed(tokens, positions.expand(tokens.shape[0], -1))
        h, read, _ = model.run_main_layers(h, positions, masks, [])
        if model.own is not None:
            return read, h, []
        final, rows = model.run_top_layers(h, read, positions, masks, [])
        return read, final, rows

    def run_own(self, read: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """What drafts start from, ``[B, S, D]``, and the rows that they see.

        ``read``, ``rows``: as ``run_main`` gives them. Own layers, which are trained, run here.
        """
        states = self.model.states(read)
        if self.model.own is not None:
            positions, masks = self._causal(read)
            _, rows = self.model.run_top_layers(states, states, positions, masks, [])
        return states, rows

    def _causal(self, rows: Tensor) -> tuple[Tensor, Masks]:
        """Positions ``[1, S]`` of whole sequences ``[B, S, ..]``, and their masks."""
        positions = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
        masks = self.model.backbone.masks(lambda window: causal(positions, window)[None, None])
        return positions[None], masks

    def _main_loss(self, final: Tensor, tokens: Tensor, nodes: Tensor, lengths: Tensor) -> Tensor:
        """The summed loss of the main stream at ``nodes [B, n]``."""
        rows = final.gather(1, nodes.clamp(min=0)[..., None].expand(-1, -1, final.shape[-1]))
        wanted = targets(tokens, nodes, lengths, 1)
        keep = wanted != IGNORE
        logits = self.model.backbone.head(rows[keep]).float()
        return cross_entropy(logits, wanted[keep], reduction="sum")

    def _segment(
        self,
        states: Tensor,
        final: Tensor | None,
        nodes: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        rows: Past,
    ) -> Tensor:
        """Summed losses ``[2, γ]`` of the streams of ``nodes [B, n]``: weighted, and plain.

        A node is a row number; -1 is none. ``final``: final states of main rows, if streams learn
        from them.
        """
        gamma = self.model.gamma
        s = self.run_streams(states, nodes, tokens, rows)
        ahead = self.ahead(tokens, nodes, lengths)
        keep = ahead.flatten(1) != IGNORE
        logits = self.model.draft_logits(self._finished(s, keep, nodes, tokens)).float()
        each = cross_entropy(logits, ahead.flatten(1)[keep], reduction="none")
        stream = torch.arange(gamma, device=s.device).expand(ahead.shape).flatten(1)[keep]
        learned = each
        if final is not None:
            taught = -(self._taught(final, nodes, keep) * torch.log_softmax(logits, -1)).sum(-1)
            learned = torch.lerp(each, taught, self.weights.soft)
        if self.weights.by_reach:
            learned = learned * self._reach(each, keep)[keep]
        return each.new_zeros(2, gamma).index_add(1, stream, torch.stack([learned, each]))

    @torch.no_grad()
    def _taught(self, final: Tensor, nodes: Tensor, keep: Tensor) -> Tensor:
        """The model's own probabilities ``[kept, n]`` of the n tokens that streams choose among.

        They are those of the main rows at the positions of the guesses to ``keep``.
        """
        at = stream_positions(nodes.clamp(min=0), self.model.gamma)[keep]
        row = torch.arange(len(keep), device=keep.device)[:, None].expand(keep.shape)[keep]
        finished = self.model.backbone.finish(final[row, at])
        return torch.softmax(self.model.draft_logits(finished).float(), -1)

    def _reach(self, each: Tensor, keep: Tensor) -> Tensor:
        """How likely all streams before a guess are right, ``[B, n * γ]``.

        ``each``: losses of the guesses to ``keep``.
        """
        right = each.new_zeros(keep.shape).masked_scatter(keep, torch.exp(-each.detach()))
        before = right.reshape(len(right), -1, self.model.gamma).roll(1, dims=-1)
        before[..., 0] = 1.0
        return before.cumprod(-1).flatten(1)

    def _finished(self, s: Tensor, keep: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
        """What the head reads ``[kept, W]`` of the streams to ``keep``.

        With ``follow`` each sees the token before the one that it guesses.
        """
        model = self.model
        finished = model.finish(s[keep])
        if model.streams is None or model.streams.follow is None:
            return finished
        at = stream_positions(nodes.clamp(min=0), model.gamma)
        before = model.backbone.embed(tokens.gather(1, at.clamp(max=tokens.shape[1] - 1)), at)
        return model.streams.after(finished, before[keep])

    def run_streams(self, states: Tensor, nodes: Tensor, tokens: Tensor, rows: Past) -> Tensor:
        """Final states ``[B, n * γ, D]`` of the streams of ``nodes [B, n]`` in ``tokens [B, S]``.

        ``states``, ``rows``: see ``run_own``.
        """
        model = self.model
        at = nodes.clamp(min=0)
        h = states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))
        context: list[list[KeyValue]] = [[] for _ in range(model.first_msa)]
        context += [[kv] for kv in rows]
        if model.own is not None:
            return self._run_drafts(h, at, tokens, context)
        chosen = model.chosen(tokens.gather(1, at + 1), at + 1)
        with attending_by_node(model, model.gamma):
            visible = self._visible(at, tokens.shape[1], model.gamma)
            return model.stream_pass(h, chosen, at.to(torch.int32), visible, context)

    def _run_drafts(
        self, h: Tensor, at: Tensor, tokens: Tensor, context: list[list[KeyValue]]
    ) -> Tensor:
        """``run_streams`` of own layers, where every draft follows the right tokens."""
        model = self.model
        found = list[Tensor]()
        own = additive(own_streams(at.shape[1], 1, at.device), model.backbone.mask_value)
        own = own.expand(len(at), 1, -1, -1)
        masks = self._visible(at, tokens.shape[1], 1)
        for j in range(model.gamma):
            at = at + 1
            token = tokens.gather(1, at.clamp(max=tokens.shape[1] - 1))
            ahead = at.to(torch.int32)
            masks = {window: torch.cat([mask, own], dim=3) for window, mask in masks.items()}
            start = model.draft_start(h, token, ahead, j)
            rope = model.backbone.rope(ahead)
            with attending_by_node(model, 1):
                h, rows = model.backbone.run(*model.drafting, start, rope, masks, context)
            for runs, row in zip(context[model.first_msa :], rows, strict=True):
                runs.append(row)
            found.append(h)
        return torch.stack(found, dim=2).flatten(1, 2)

    def _visible(self, at: Tensor, width: int, gamma: int) -> Masks:
        """Masks of the γ streams of nodes in rows ``at [B, n]`` over ``width`` main rows.

        They see the rows up to the node that lie in the window of their own position.
        """
        row = torch.arange(width, device=at.device)
        node = at.repeat_interleave(gamma, dim=1)[..., None]
        position = stream_positions(at, gamma)[..., None]

        def visible(window: int | None) -> Tensor:
            seen = row <= node
            if window is not None:
                seen = seen & (position - row < window)
            return seen[:, None]

        return self.model.backbone.masks(visible)


def completion_rows(prompts: Tensor, lengths: Tensor) -> Tensor:
    """``[B, n]`` row numbers from the last prompt token to the last token but one.

    They are -1 beyond the end of a shorter sequence.
    """
    first = prompts - 1
    last = lengths - 2
    offsets = torch.arange(int((last - first).max()) + 1, device=prompts.device)
    rows = first[:, None] + offsets
    return torch.where(rows <= last[:, None], rows, -1)


def targets(tokens: Tensor, nodes: Tensor, lengths: Tensor, ahead: int) -> Tensor:
    """The token ``ahead`` places after each node ``[B, n]``.

    IGNORE beyond the sequence and for node -1.
    """
    where = nodes + ahead
    inside = (nodes >= 0) & (where < lengths[:, None])
    return torch.where(inside, tokens.gather(1, where.clamp(0, tokens.shape[1] - 1)), IGNORE)


@contextmanager
def attending_by_node(model: StreamModel, gamma: int) -> Iterator[None]:
    """In this context layers run on the streams of nodes with less work: see ``attend_by_node``.

    The default computes every stream's scores against every stream of the batch, and masks all but
    γ of them.
    """
    backbone = model.backbone
    before = model.backbone.operators
    backbone.operators = replace(before, attention=partial(attend_by_node, gamma=gamma))
    try:
        yield
    finally:
        backbone.operators = before


def attend_by_node(asked: Attending, gamma: int) -> Tensor:
    """``attend`` for the γ streams of each of n nodes, ``[B, n * γ, heads, hd]``.

    The first run is main rows; each other run is γ rows of each node, of which a stream sees those
    of its own node only.
    """
    past_keys, *own_keys = asked.keys
    past_values, *own_values = asked.values
    batch, heads, rows, dim = asked.query.shape
    kv_heads = past_keys.shape[1]
    past = past_keys.shape[2]
    groups = heads // kv_heads
    nodes = rows // gamma

    def by_node(x: Tensor) -> Tensor:
        """``[B, h * kv_heads, n * γ, e] -> [B, kv_heads, n, h * γ, e]``."""
        x = x.reshape(batch, kv_heads, -1, nodes, gamma, x.shape[-1]).transpose(2, 3)
        return x.reshape(batch, kv_heads, nodes, -1, x.shape[-1])

    def by_row(x: Tensor) -> Tensor:
        """``[B, kv_heads, n, groups * γ, e] -> [B, kv_heads, groups * n * γ, e]``."""
        x = x.reshape(batch, kv_heads, nodes, groups, gamma, x.shape[-1]).transpose(2, 3)
        return x.reshape(batch, kv_heads, groups * rows, x.shape[-1])

    q = asked.query * asked.scale
    seen = torch.matmul(q.reshape(batch, kv_heads, groups * rows, dim), past_keys.transpose(2, 3))
    own = [by_row(torch.matmul(by_node(q), by_node(keys).transpose(3, 4))) for keys in own_keys]
    every = past + gamma * len(own)
    scores = torch.cat([seen, *own], dim=-1).reshape(batch, kv_heads, groups, rows, every)
    if asked.softcap is not None:
        scores = torch.tanh(scores / asked.softcap) * asked.softcap
    starts = range(past, asked.mask.shape[-1], rows)
    of_first_node = [asked.mask[:, :, :gamma, at : at + gamma] for at in starts]
    block = torch.cat(of_first_node, dim=-1).repeat(1, 1, nodes, 1)  # the same for every node
    mask = torch.cat([asked.mask[..., :past], block], dim=-1)
    weights = torch.softmax(scores + mask[:, :, None], dim=-1).to(q.dtype)
    weights = weights.reshape(batch, kv_heads, groups * rows, every)
    out = torch.matmul(weights[..., :past], past_values)
    own_weights = torch.split(weights[..., past:], gamma, dim=-1)
    for part, values in zip(own_weights, own_values, strict=True):
        part = part.reshape(batch, kv_heads * groups, rows, gamma)
        out = out + by_row(torch.matmul(by_node(part), by_node(values)))
    return out.reshape(asked.query.shape).transpose(1, 2)
