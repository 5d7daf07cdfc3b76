"""The step: verify a draft tree and write the next draft in one call (2402.11131 section 3.2;
ssdevice/contract.py).

T tree nodes, A = depth + 1, γ streams with k candidates each, D hidden, P rows of past. Batch is 1,
integers are int32, and every size but P is a Python constant, so the graphs are static.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ssdevice.config import Schedule
from ssdevice.errors import ConfigError
from ssdevice.model.attention import Context, KeyValue
from ssdevice.model.backbone import Backbone, Masks
from ssdevice.model.operators import argmax
from ssdevice.model.streams import DraftLayers, Streams
from ssdevice.model.visibility import (
    additive,
    causal,
    committed,
    own_streams,
    stream_positions,
    within,
)
from ssdevice.tree import Tree

Rows = list[KeyValue]
"""Per layer the new (keys, values) rows ``[1, kv_heads, R, head_dim]``."""
Past = Sequence[KeyValue]
"""Per layer the (keys, values) rows ``[1, kv_heads, P, head_dim]``; rows at ``length`` and beyond
are masked.
"""


@dataclass(frozen=True)
class Step:
    """The outputs of a step: ``tokens [A]``, ``count [1]``, ``drafts [γ, k]`` and A rows per layer
    to commit.

    ``logits [T, V]``: the main stream's logits at every node, which most callers ignore.
    """

    tokens: Tensor
    count: Tensor
    drafts: Tensor
    rows: list[KeyValue]
    logits: Tensor


@dataclass(frozen=True)
class Prefill:
    """The outputs of a prefill: ``token [1]``, ``drafts [γ, k]`` and C rows per layer to commit."""

    token: Tensor
    drafts: Tensor
    rows: list[KeyValue]


class StreamModel(nn.Module):
    """A backbone with its streams, from which step, prefill and training are built.

    ``streams``: None for plain decoding and where the host drafts. ``gamma``: the number of streams
    that run (deeper ones are dropped), or of the host's drafts.
    """

    def __init__(self, backbone: Backbone, streams: Streams | None, gamma: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.streams = streams
        self.gamma = gamma
        self.first_msa = backbone.num_layers - (
            streams.config.msa_layers if streams is not None else 0
        )
        self.draft_head: nn.Linear | None = None
        self.take_draft_rows()

    def plain(self) -> "StreamModel":
        """The same model without drafts; own layers still write their rows."""
        return StreamModel(self.backbone, self.streams if self.own is not None else None, 0)

    @property
    def own(self) -> DraftLayers | None:
        """The layers of their own that draft; None where streams do, or nothing."""
        return self.streams.own if self.streams is not None else None

    def take_draft_rows(self) -> None:
        """Copy the LM head's rows of the draft vocabulary.

        Call this whenever the vocabulary changes.
        """
        if self.streams is not None and self.gamma and self.streams.config.draft_vocabulary:
            self.draft_head = self.backbone.head_rows(self.streams.draft_ids)

    def run_main_layers(
        self, h: Tensor, positions: Tensor, masks: Masks, past: Past
    ) -> tuple[Tensor, Tensor, Rows]:
        """The N - N_s MHA layers on main rows ``h [B, R, D]`` at ``positions [B, R]``.

        Returns their states ``[B, R, D]``, what drafts read of them (these states, or with own
        layers several ``[B, R, n D]``), and new rows.
        """
        backbone = self.backbone
        runs = [[kv] for kv in past]
        rope = backbone.rope(positions)
        read = list[Tensor]()
        rows = list[KeyValue]()
        for first, last in pairwise(
            (0, *(self.own.after if self.own is not None else (self.first_msa,)))
        ):
            h, new = backbone.run(first, last, h, rope, masks, runs)
            read.append(h)
            rows += new
        return h, torch.cat(read, dim=-1) if len(read) > 1 else h, rows

    def states(self, read: Tensor) -> Tensor:
        """What drafts start from, ``[B, R, D]``: the states at layer N - N_s, or those that own
        layers fuse.
        """
        return read if self.own is None else self.own.fused(read)

    def run_top_layers(
        self, h: Tensor, states: Tensor, positions: Tensor, masks: Masks, past: Past
    ) -> tuple[Tensor, Rows]:
        """The top N_s layers (2402.11131 eq. 1), or own layers, on main rows ``h [B, R, D]`` at
        ``positions [B, R]``.

        ``states [B, R, D]``: what drafts start from. Returns final states ``[B, R, D]`` and new
        rows.
        """
        runs = [[kv] for kv in past]
        final, rows = self.backbone.run(
            *self.drafting, states, self.backbone.rope(positions), masks, runs
        )
        return final if self.own is None else h, rows

    def draft_start(self, h: Tensor, token: Tensor, at: Tensor, j: int) -> Tensor:
        """Draft j (from 0) of own layers before these, ``[B, n, D]``.

        ``h [B, n, D]``: the states of the rows or drafts before it. ``token [B, n]``: what follows
        these, at the positions ``at [B, n]``.
        """
        assert self.own is not None and self.streams is not None
        return self.own.start(h, self.backbone.embed(token, at)) + self.streams.identifiers[j].to(
            h.dtype
        )

    @property
    def drafting(self) -> tuple[int, int]:
        """The first of the layers that streams or drafts pass, and the number after the last."""
        return self.first_msa, self.backbone.num_layers if self.own is None else len(
            self.backbone.layers
        )

    def masks(
        self, at: Tensor, length: Tensor, past: Past, new: Callable[[int | None], Tensor]
    ) -> Masks:
        """Masks ``[1, 1, R, P + n]`` of rows at ``at [R]``: they see committed rows, and new ones
        as ``new`` says.

        ``new``: which of n new rows they see within a window, ``[R, n]`` bool.
        """

        def visible(window: int | None) -> Tensor:
            others = new(window)
            return torch.cat([committed(at, length, past[0][0].shape[2], window), others], dim=1)[
                None, None
            ]

        return self.backbone.masks(visible)

    def chosen(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """What streams see of the tokens chosen for ``positions``, both ``[B, n]``; None: nothing."""
        if self.streams is None or not self.streams.config.waits:
            return None
        return self.backbone.embed(tokens, positions)

    def stream_pass(
        self, h: Tensor, chosen: Tensor | None, positions: Tensor, visible: Masks, context: Context
    ) -> Tensor:
        """The MSA layers on the streams of n nodes, without main rows (2402.11131 eq. 2 and 3).

        ``h [B, n, D]``: the nodes at layer N - N_s, at ``positions [B, n]``. ``chosen``: of the
        tokens after them. ``context``: per layer the runs of rows that streams may see, masked by
        ``visible [B or 1, 1, n * γ, rows]``. Returns ``[B, n * γ, D]``.
        """
        backbone = self.backbone
        streams = self.streams
        assert streams is not None
        own = additive(own_streams(h.shape[1], self.gamma, h.device), backbone.mask_value)
        masks = {
            w: torch.cat([m, own.expand(m.shape[0], 1, -1, -1)], dim=3) for w, m in visible.items()
        }
        rope = backbone.rope(stream_positions(positions, self.gamma))
        start = streams.start(h, self.gamma, chosen)
        with streams.rows_after(0):
            s, _ = backbone.run(*self.drafting, start, rope, masks, context)
        return s

    def draft_after(
        self, h: Tensor, token: Tensor, length: Tensor, last: Tensor, past: Past, rows: Past, k: int
    ) -> Tensor:
        """Candidates ``[γ, k]`` of the node in new row ``last [1]``; ``h [1, 1, D]``: its state,
        see ``states``.

        ``token [1]``: the main stream's choice after this node. ``rows``: the new rows from
        position ``length`` on, of which ``0..last`` are the node's path and itself.
        """
        offsets = torch.arange(rows[0][0].shape[2], dtype=torch.int32, device=h.device)
        node_at = length + last
        at = stream_positions(node_at, self.gamma)
        visible = self.masks(
            at, length, past, lambda w: (offsets <= last)[None] & within(at, length + offsets, w)
        )
        runs = [[old, mine] for old, mine in zip(past, rows, strict=True)]
        return self.draft(h, token, node_at, visible, runs, k)

    def draft(
        self, h: Tensor, token: Tensor, node_at: Tensor, visible: Masks, context: Context, k: int
    ) -> Tensor:
        """Candidates ``[γ, k]`` after ``token [1]``, chosen for the node at ``node_at [1]`` with
        the state ``h``.

        ``context``: per layer the runs of rows that drafts may see, masked by ``visible [1, 1, γ,
        rows]``.
        """
        if self.own is None:
            chosen = self.chosen(token[None], node_at[None] + 1)
            return self.best(
                self.stream_pass(h, chosen, node_at[None], visible, context), token, node_at, k
            )
        runs = [list(each) for each in context]
        drafts = list[Tensor]()
        for j in range(self.gamma):
            at = (node_at + (j + 1))[None]
            seen = {
                w: torch.cat([m[:, :, j : j + 1], torch.zeros(1, 1, 1, j + 1)], dim=3)
                for w, m in visible.items()
            }
            start = self.draft_start(h, token[None], at, j)
            h, rows = self.backbone.run(*self.drafting, start, self.backbone.rope(at), seen, runs)
            for layer, row in enumerate(rows, self.first_msa):
                runs[layer] = [
                    runs[layer][0],
                    joined(*runs[layer][1:], row),
                ]  # targets take one run beside the past
            drafts.append(self._candidates(self.finish(h), k))
            token = drafts[-1][0, :1]
        return torch.cat(drafts)

    def best(self, s: Tensor, token: Tensor, node_at: Tensor, k: int) -> Tensor:
        """The k likeliest tokens of each stream, ``[1, γ, D] -> [γ, k]``; only these rows pass the
        LM head.

        ``token [1]``: the choice after the streams' node, which is at position ``node_at [1]``.
        With ``follow``, a stream sees the likeliest token of the one before it, and the first
        stream this choice.
        """
        finished = self.finish(s)
        if self.streams is None or self.streams.follow is None:
            return self._candidates(finished, k)
        drafts: list[Tensor] = []
        for j in range(self.gamma):
            before = self.backbone.embed(token[None], node_at[None] + (j + 1))
            drafts.append(self._candidates(self.streams.after(finished[:, j : j + 1], before), k))
            token = drafts[-1][0, :1]
        return torch.cat(drafts)

    def finish(self, s: Tensor) -> Tensor:
        """What the head reads, ``[.., W]``, of the final states of streams or drafts, ``[.., D]``."""
        return (
            self.backbone.finish(s)
            if self.own is None
            else self.backbone.project_out(self.own.norm(s))
        )

    def _candidates(self, finished: Tensor, k: int) -> Tensor:
        """The k likeliest tokens of each row, ``[1, n, W] -> [n, k]``."""
        return self.draft_tokens(self.backbone.operators.top_k(self.draft_logits(finished)[0], k))

    def draft_tokens(self, rows: Tensor) -> Tensor:
        """Token ids, int32, of ``rows`` of the streams' head, in the same shape; these rows
        themselves without a draft vocabulary.
        """
        if self.draft_head is None or self.streams is None:
            return rows
        return self.streams.draft_ids.index_select(0, rows.reshape(-1)).reshape(rows.shape)

    def draft_logits(self, finished: Tensor) -> Tensor:
        """Logits ``[.., V]`` of streams ``finished [.., W]``, or ``[.., n]`` with a draft
        vocabulary of n tokens.
        """
        return self.backbone.logits(finished, self.draft_head)


@dataclass(frozen=True)
class TreeRows:
    """Main rows of a tree's nodes before the MSA layers, and new rows of the layers below.

    ``h``, ``states [1, T, D]``: the latter are what drafts start from, see ``StreamModel.states``.
    """

    tokens: Tensor
    positions: Tensor
    masks: Masks
    h: Tensor
    states: Tensor
    rows: Rows


class TreeModule(nn.Module):
    """The tables of one tree, and its nodes' main rows through the N - N_s MHA layers."""

    draft_indices: Tensor
    depths: Tensor
    parents: Tensor
    paths: Tensor
    ancestors: Tensor

    def __init__(self, model: StreamModel, tree: Tree, k: int) -> None:
        super().__init__()
        self.model = model
        self.tree = tree
        self.k = k
        for name, table, kind in (
            ("draft_indices", tree.draft_indices(k), torch.int32),
            ("depths", tree.depths, torch.int32),
            ("parents", tree.parents, torch.int32),
            ("paths", tree.path_table, torch.int32),
            ("ancestors", tree.ancestors, torch.bool),
        ):
            self.register_buffer(name, torch.tensor(table, dtype=kind), persistent=False)

    def main_rows(self, last: Tensor, drafts: Tensor, length: Tensor, past: Past) -> TreeRows:
        """The tree after the token ``last [1]``, at ``length [1]`` committed tokens.

        Its tokens are gathered from the drafts, one position per depth; a node sees the past, its
        ancestors and itself (2402.11131 eq. 4).
        """
        model = self.model
        tokens = torch.cat([last, drafts.reshape(-1)]).index_select(0, self.draft_indices)
        positions = length + self.depths
        masks = model.masks(
            positions, length, past, lambda w: self.ancestors & within(self.depths, self.depths, w)
        )
        h = model.backbone.embed(tokens[None], positions[None])
        h, read, rows = model.run_main_layers(h, positions[None], masks, past)
        return TreeRows(tokens, positions, masks, h, model.states(read), rows)


@dataclass(frozen=True)
class Verified:
    """The outputs of ``verify``: ``logits [T, V]``, ``states [T, D]`` from which drafts start, T
    rows per layer.
    """

    logits: Tensor
    states: Tensor
    rows: list[KeyValue]


class VerifyModule(TreeModule):
    """``verify`` for one tree; with the root-only tree it is ``verify_plain``.

    The caller chooses among the nodes.
    """

    def forward(self, last: Tensor, drafts: Tensor, length: Tensor, past: Past) -> Verified:
        """The rows of the tree after the token ``last [1]``, at ``length [1]`` committed tokens."""
        seen = self.main_rows(last, drafts, length, past)
        h, rows = self.model.run_top_layers(
            seen.h, seen.states, seen.positions[None], seen.masks, past
        )
        # The axis goes before the head: a graph would copy the logits.
        return Verified(
            self.model.backbone.logits(self.model.backbone.finish(h)[0]),
            seen.states[0],
            seen.rows + rows,
        )


class DraftModule(nn.Module):
    """``draft``: the streams of the last committed node write the next tree."""

    def __init__(self, model: StreamModel, k: int) -> None:
        super().__init__()
        self.model = model
        self.k = k

    def forward(self, token: Tensor, state: Tensor, length: Tensor, past: Past) -> Tensor:
        """Candidates ``[γ, k]`` after ``token [1]``, chosen for the node that is the last of
        ``length [1]`` rows.

        ``state [1, D]``: that node's, from ``verify``.
        """
        model = self.model
        node_at = length - 1
        at = stream_positions(node_at, model.gamma)
        visible = model.masks(
            at, length, past, lambda window: torch.zeros(model.gamma, 0, dtype=torch.bool)
        )
        return model.draft(state[None], token, node_at, visible, [[kv] for kv in past], self.k)


class StepModule(TreeModule):
    """``step`` for one tree and schedule; with the root-only tree and no streams it is
    ``step_plain``.
    """

    def __init__(self, model: StreamModel, tree: Tree, k: int, schedule: Schedule) -> None:
        super().__init__(model, tree, k)
        if model.streams is not None and model.streams.config.waits and schedule is Schedule.FUSED:
            raise ConfigError(
                "streams that see the chosen token cannot run beside the rows that choose it"
            )
        self.schedule = schedule

    def forward(self, last: Tensor, drafts: Tensor, length: Tensor, past: Past) -> Step:
        """One step after the token ``last [1]``, at ``length [1]`` committed tokens."""
        model = self.model
        tree = self.tree
        seen = self.main_rows(last, drafts, length, past)

        # The MSA layers: with the streams of every node beside it, or without, until it is known
        # which node counts.
        fused = model.streams is not None and self.schedule is Schedule.FUSED
        if fused:
            h, streams, top_rows = self._fused(seen.h, seen.positions, length, seen.masks, past)
        else:
            h, top_rows = model.run_top_layers(
                seen.h, seen.states, seen.positions[None], seen.masks, past
            )

        # Verify: the main stream's own choice at every node decides which path is accepted.
        logits = model.backbone.head(h)[0]
        predicted = argmax(logits)
        end = self._verify(seen.tokens, predicted)
        depth = self.depths.index_select(0, end)

        # Commit: only what lies on the accepted path counts. In a chain it lies in front already.
        rows = seen.rows + top_rows
        if not tree.is_chain:
            path = self.paths.index_select(0, end)[0]
            predicted = predicted.index_select(0, path)
            rows = [
                (keys.index_select(2, path), values.index_select(2, path)) for keys, values in rows
            ]

        # Draft: the streams of the end node write the next tree.
        if model.streams is not None and model.gamma:
            token = predicted.index_select(0, depth)
            if fused:
                by_node = streams.reshape(tree.size, model.gamma, -1)
                drafts = model.best(by_node.index_select(0, end), token, length + depth, self.k)
            else:
                drafts = model.draft_after(
                    seen.states.index_select(1, end), token, length, depth, past, rows, self.k
                )
        elif model.gamma:
            drafts = no_drafts(predicted[:1], model.gamma, self.k)
        return Step(predicted, depth + 1, drafts, rows, logits)

    def _verify(self, tokens: Tensor, predicted: Tensor) -> Tensor:
        """``[1]``: the deepest node whose whole path agrees with the predictions; the lowest index
        wins a tie.
        """
        if self.tree.size == 1:
            return torch.zeros(1, dtype=torch.int32)
        # The root is the main stream's own token and always accepted, so its column is left out.
        agrees = tokens[1:] == predicted.index_select(0, self.parents[1:])
        wrong = torch.where(agrees, 0.0, 1.0)[:, None]
        rejected = torch.matmul(self.ancestors[:, 1:].to(wrong.dtype), wrong)[:, 0]
        return argmax(torch.where(rejected < 0.5, self.depths + 1.0, 0.0)[None])

    def _fused(
        self, h: Tensor, positions: Tensor, length: Tensor, masks: Masks, past: Past
    ) -> tuple[Tensor, Tensor, list[KeyValue]]:
        """The MSA layers over T main rows and T * γ stream rows at once: ``(main, streams, main's
        new rows)``.
        """
        model = self.model
        size = self.tree.size
        streams = model.streams
        gamma = model.gamma
        assert streams is not None
        at = stream_positions(positions, gamma)
        ancestors = self.ancestors.repeat_interleave(gamma, dim=0)
        own = own_streams(size, gamma)
        of_main = self._streams_of_main(size, gamma)

        def streams_see(window: int | None) -> Tensor:
            tree = ancestors & within(at, positions, window)
            return torch.cat(
                [committed(at, length, past[0][0].shape[2], window), tree, own], dim=1
            )[None, None]

        of_streams = model.backbone.masks(streams_see)
        both_masks = {
            w: torch.cat([torch.cat([masks[w], of_main], dim=3), of_streams[w]], dim=2)
            for w in masks
        }
        both = torch.cat([h, streams.start(h, gamma)], dim=1)
        where = torch.cat([positions, at])[None]
        with streams.rows_after(size):
            both, new = model.run_top_layers(both, both, where, both_masks, past)
        return (
            both[:, :size],
            both[:, size:],
            [(keys[:, :, :size], values[:, :, :size]) for keys, values in new],
        )

    def _streams_of_main(self, size: int, gamma: int) -> Tensor:
        """Additive mask ``[1, 1, T, T * γ]`` of main rows over streams: they see none (2402.11131
        eq. 1).
        """
        return torch.full((1, 1, size, size * gamma), self.model.backbone.mask_value)


class PrefillModule(nn.Module):
    """``prefill``: commit a chunk of C prompt tokens; the last chunk's token and drafts start
    decoding.
    """

    offsets: Tensor

    def __init__(self, model: StreamModel, chunk: int, k: int) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.k = k
        self.register_buffer("offsets", torch.arange(chunk, dtype=torch.int32), persistent=False)

    def forward(self, tokens: Tensor, valid: Tensor, length: Tensor, past: Past) -> Prefill:
        """``tokens [C]`` of which ``valid [1]`` count, at ``length [1]`` committed tokens."""
        model = self.model
        backbone = self.model.backbone
        offsets = self.offsets
        positions = length + offsets
        masks = model.masks(positions, length, past, lambda window: causal(offsets, window))
        h = backbone.embed(tokens[None], positions[None])
        h, read, rows = model.run_main_layers(h, positions[None], masks, past)
        states = model.states(read)
        h, top_rows = model.run_top_layers(h, states, positions[None], masks, past)
        rows = rows + top_rows
        last = valid - 1
        token = argmax(backbone.head(h.index_select(1, last))[0])
        if model.streams is None:
            return Prefill(token, no_drafts(token, model.gamma, self.k), rows)
        drafts = model.draft_after(
            states.index_select(1, last), token, length, last, past, rows, self.k
        )
        return Prefill(token, drafts, rows)


def joined(*runs: KeyValue) -> KeyValue:
    """Runs of rows as one, ``[B, kv_heads, n, head_dim]`` each of keys and values: in order, along
    n.
    """
    keys, values = zip(*runs, strict=True)
    return (torch.cat(keys, dim=2), torch.cat(values, dim=2)) if len(runs) > 1 else runs[0]


def no_drafts(token: Tensor, gamma: int, k: int) -> Tensor:
    """Zeros ``[γ, k]``, where the host drafts: a product of ``token [1]``, as a Core ML output
    cannot be a constant.
    """
    return token * torch.zeros(gamma, k, dtype=torch.int32)
