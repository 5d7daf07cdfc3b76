"""The step: verify a draft tree and write the next draft in one call (2402.11131 section 3.2).

Sizes, as in ssdevice/contract.py: T tree nodes, A = depth + 1, γ streams with k candidates each, D
elements of a state, P rows of past; as in the paper, N layers, of which the top N_s are MSA layers.
Batch is 1, integers are int32, and every size but P is a Python constant, so the graphs are static.

The classes below build on each other: ``StreamModel`` runs layers on main rows and on streams;
``StepModule``, ``PrefillModule``, ``VerifyModule`` and ``DraftModule`` are the functions of the
contract.
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
"""Per layer the (keys, values) rows ``[1, kv_heads, P, head_dim]``.

Rows at ``length`` and beyond are masked.
"""


@dataclass(frozen=True)
class Step:
    """The outputs of a step.

    ``tokens [A]``, of which ``count [1]`` are emitted; ``drafts [γ, k]`` for the next step; A rows
    per layer to commit. ``logits [T, V]``: the main stream's at every node, which most callers
    ignore.
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
        self.first_msa = backbone.num_layers  # N - N_s
        if streams is not None:
            self.first_msa -= streams.config.msa_layers
        self.draft_head: nn.Linear | None = None
        self.take_draft_rows()

    def plain(self) -> "StreamModel":
        """The same model without drafts; own layers still write their rows."""
        kept = self.streams if self.own is not None else None
        return StreamModel(self.backbone, kept, gamma=0)

    @property
    def own(self) -> DraftLayers | None:
        """The layers that draft in place of streams; None without them."""
        if self.streams is None:
            return None
        return self.streams.own

    @property
    def drafting(self) -> tuple[int, int]:
        """The first of the layers that streams or drafts pass, and the number after the last."""
        if self.own is None:
            return self.first_msa, self.backbone.num_layers
        return self.first_msa, len(self.backbone.layers)

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

        Returns their states ``[B, R, D]``, what ``states`` reads of them (the same, or with own
        layers the states after several layers, ``[B, R, n D]``), and the new rows.
        """
        ends = [self.first_msa] if self.own is None else self.own.after
        rope = self.backbone.rope(positions)
        runs = [[kv] for kv in past]
        read = list[Tensor]()
        rows = list[KeyValue]()
        for first, last in pairwise([0, *ends]):
            h, new = self.backbone.run(first, last, h, rope, masks, runs)
            read.append(h)
            rows += new
        if len(read) == 1:
            return h, h, rows
        return h, torch.cat(read, dim=-1), rows

    def states(self, read: Tensor) -> Tensor:
        """What drafts start from, ``[B, R, D]``: states at layer N - N_s, or those that own layers
        fuse.
        """
        if self.own is None:
            return read
        return self.own.fused(read)

    def run_top_layers(
        self, h: Tensor, states: Tensor, positions: Tensor, masks: Masks, past: Past
    ) -> tuple[Tensor, Rows]:
        """The top N_s layers on main rows ``h [B, R, D]`` (2402.11131 eq. 1), or own layers.

        ``states [B, R, D]``: what drafts start from. ``positions [B, R]``: of the rows. Returns the
        final states ``[B, R, D]`` and the new rows.
        """
        rope = self.backbone.rope(positions)
        runs = [[kv] for kv in past]
        top, rows = self.backbone.run(*self.drafting, states, rope, masks, runs)
        if self.own is not None:  # whose states only drafts read
            return h, rows
        return top, rows

    def draft_start(self, h: Tensor, token: Tensor, at: Tensor, j: int) -> Tensor:
        """The state of draft j (from 0) before own layers, ``[B, n, D]``.

        ``h [B, n, D]``: the states of the rows or drafts before it. ``token [B, n]``: what follows
        these, at the positions ``at [B, n]``.
        """
        assert self.own is not None and self.streams is not None
        start = self.own.start(h, self.backbone.embed(token, at))
        return start + self.streams.identifiers[j].to(h.dtype)

    def masks(
        self, at: Tensor, length: Tensor, past: Past, new: Callable[[int | None], Tensor]
    ) -> Masks:
        """Masks ``[1, 1, R, P + n]`` of rows at ``at [R]`` over P rows of past and n new ones.

        Of the past they see committed rows. ``new``: which of the new rows they see within a
        window, ``[R, n]`` bool.
        """
        past_rows = past[0][0].shape[2]

        def visible(window: int | None) -> Tensor:
            others = new(window)
            seen = torch.cat([committed(at, length, past_rows, window), others], dim=1)
            return seen[None, None]

        return self.backbone.masks(visible)

    def chosen(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """The embeddings of the chosen ``tokens`` for g, ``[B, n, D]``; None without g.

        ``tokens``, ``positions``: ``[B, n]``.
        """
        if self.streams is None or not self.streams.config.waits:
            return None
        return self.backbone.embed(tokens, positions)

    def stream_pass(
        self, h: Tensor, chosen: Tensor | None, positions: Tensor, visible: Masks, context: Context
    ) -> Tensor:
        """The MSA layers on the streams of n nodes, without main rows (2402.11131 eq. 2 and 3).

        ``h [B, n, D]``: the nodes at layer N - N_s, at ``positions [B, n]``. ``chosen``: see the
        method, of the tokens after the nodes. ``context``: per layer the runs of rows that streams
        may see, masked by ``visible [B or 1, 1, n * γ, rows]``. Returns ``[B, n * γ, D]``.
        """
        backbone = self.backbone
        streams = self.streams
        assert streams is not None
        # A stream also sees the streams of its own node, up to itself.
        own = additive(own_streams(h.shape[1], self.gamma, h.device), backbone.mask_value)
        masks: Masks = {}
        for window, mask in visible.items():
            batch = mask.shape[0]
            masks[window] = torch.cat([mask, own.expand(batch, 1, -1, -1)], dim=3)
        rope = backbone.rope(stream_positions(positions, self.gamma))
        start = streams.start(h, self.gamma, chosen)
        with streams.rows_after(0):
            s, _ = backbone.run(*self.drafting, start, rope, masks, context)
        return s

    def draft_after(
        self, h: Tensor, token: Tensor, length: Tensor, last: Tensor, past: Past, rows: Past, k: int
    ) -> Tensor:
        """Candidates ``[γ, k]`` of the node in new row ``last [1]``.

        ``h [1, 1, D]``: the node's state, see ``states``. ``token [1]``: the main stream's choice
        after the node. ``rows``: the new rows from position ``length`` on, of which ``0..last`` are
        the node's path and itself.
        """
        offsets = torch.arange(rows[0][0].shape[2], dtype=torch.int32, device=h.device)
        node_at = length + last
        at = stream_positions(node_at, self.gamma)

        def path_rows(window: int | None) -> Tensor:
            return (offsets <= last)[None] & within(at, length + offsets, window)

        visible = self.masks(at, length, past, path_rows)
        runs = [[old, new] for old, new in zip(past, rows, strict=True)]
        return self.draft(h, token, node_at, visible, runs, k)

    def draft(
        self, h: Tensor, token: Tensor, node_at: Tensor, visible: Masks, context: Context, k: int
    ) -> Tensor:
        """Candidates ``[γ, k]`` after ``token [1]``, of streams or of own layers.

        ``token`` was chosen for the node at ``node_at [1]`` with the state ``h [1, 1, D]``.
        ``context``: per layer the runs of rows that drafts may see, masked by ``visible [1, 1, γ,
        rows]``.
        """
        if self.own is not None:
            return self._draft_one_by_one(h, token, node_at, visible, context, k)
        chosen = self.chosen(token[None], node_at[None] + 1)
        s = self.stream_pass(h, chosen, node_at[None], visible, context)
        return self.best(s, token, node_at, k)

    def _draft_one_by_one(
        self, h: Tensor, token: Tensor, node_at: Tensor, visible: Masks, context: Context, k: int
    ) -> Tensor:
        """``draft`` by own layers: each draft sees the likeliest token of the one before it."""
        runs = [list(each) for each in context]
        drafts = list[Tensor]()
        for j in range(self.gamma):
            at = (node_at + (j + 1))[None]
            seen: Masks = {}
            for window, mask in visible.items():
                of_draft = mask[:, :, j : j + 1]
                earlier_drafts = torch.zeros(1, 1, 1, j + 1)
                seen[window] = torch.cat([of_draft, earlier_drafts], dim=3)
            start = self.draft_start(h, token[None], at, j)
            h, rows = self.backbone.run(*self.drafting, start, self.backbone.rope(at), seen, runs)
            for layer, row in enumerate(rows, self.first_msa):
                past, *new = runs[layer]
                # Targets take one run of rows beside the past.
                runs[layer] = [past, joined(*new, row)]
            drafts.append(self._candidates(self.finish(h), k))
            token = drafts[-1][0, :1]
        return torch.cat(drafts)

    def best(self, s: Tensor, token: Tensor, node_at: Tensor, k: int) -> Tensor:
        """The k likeliest tokens of each stream, ``[1, γ, D] -> [γ, k]``.

        Only these rows pass the LM head. ``token [1]``: the choice after the streams' node, which
        is at position ``node_at [1]``. With ``follow``, the first stream sees this choice, and each
        other stream the likeliest token of the one before it.
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
        """What the head reads of the final states of streams or drafts: ``[.., D] -> [.., W]``."""
        if self.own is None:
            return self.backbone.finish(s)
        finished: Tensor = self.backbone.project_out(self.own.norm(s))
        return finished

    def _candidates(self, finished: Tensor, k: int) -> Tensor:
        """The k likeliest tokens of each row, ``[1, n, W] -> [n, k]``."""
        logits = self.draft_logits(finished)[0]
        return self.draft_tokens(self.backbone.operators.top_k(logits, k))

    def draft_tokens(self, rows: Tensor) -> Tensor:
        """Token ids, int32, of ``rows`` of the streams' head, in the same shape.

        Without a draft vocabulary the rows are the ids.
        """
        if self.draft_head is None or self.streams is None:
            return rows
        return self.streams.draft_ids.index_select(0, rows.reshape(-1)).reshape(rows.shape)

    def draft_logits(self, finished: Tensor) -> Tensor:
        """Logits of streams ``finished [.., W]``.

        ``[.., V]``, or ``[.., n]`` with a draft vocabulary of n tokens.
        """
        return self.backbone.logits(finished, self.draft_head)


@dataclass(frozen=True)
class TreeRows:
    """The main rows of a tree's nodes after the N - N_s MHA layers, and these layers' new rows.

    ``tokens``, ``positions``: ``[T]``. ``masks``: of the nodes, over past rows and each other.
    ``h [1, T, D]``: their states. ``states [1, T, D]``: what drafts start from, see
    ``StreamModel.states``.
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
        tables = {
            "draft_indices": tree.draft_indices(k),
            "depths": tree.depths,
            "parents": tree.parents,
            "paths": tree.path_table,
        }
        for name, table in tables.items():
            self.register_buffer(name, torch.tensor(table, dtype=torch.int32), persistent=False)
        ancestors = torch.tensor(tree.ancestors, dtype=torch.bool)
        self.register_buffer("ancestors", ancestors, persistent=False)

    def main_rows(self, last: Tensor, drafts: Tensor, length: Tensor, past: Past) -> TreeRows:
        """The tree after the token ``last [1]``, at ``length [1]`` committed tokens.

        Its tokens are gathered from the drafts, one position per depth; a node sees the past, its
        ancestors and itself (2402.11131 eq. 4).
        """
        model = self.model
        tokens = torch.cat([last, drafts.reshape(-1)]).index_select(0, self.draft_indices)
        positions = length + self.depths

        def tree_rows(window: int | None) -> Tensor:
            return self.ancestors & within(self.depths, self.depths, window)

        masks = model.masks(positions, length, past, tree_rows)
        h = model.backbone.embed(tokens[None], positions[None])
        h, read, rows = model.run_main_layers(h, positions[None], masks, past)
        return TreeRows(tokens, positions, masks, h, model.states(read), rows)


@dataclass(frozen=True)
class Verified:
    """The outputs of ``verify``: ``logits [T, V]``, ``states [T, D]`` and T rows per layer.

    ``states``: what drafts start from, see ``StreamModel.states``.
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
        # The axis of the batch goes before the head, because a graph would copy the logits.
        finished = self.model.backbone.finish(h)[0]
        logits = self.model.backbone.logits(finished)
        return Verified(logits, seen.states[0], seen.rows + rows)


class DraftModule(nn.Module):
    """``draft``: the streams of the last committed node write the next tree."""

    def __init__(self, model: StreamModel, k: int) -> None:
        super().__init__()
        self.model = model
        self.k = k

    def forward(self, token: Tensor, state: Tensor, length: Tensor, past: Past) -> Tensor:
        """Candidates ``[γ, k]`` after ``token [1]``, which was chosen for the last committed node.

        That node is the last of ``length [1]`` rows. ``state [1, D]``: its state, from ``verify``.
        """
        model = self.model
        node_at = length - 1
        at = stream_positions(node_at, model.gamma)

        def no_rows(window: int | None) -> Tensor:
            return torch.zeros(model.gamma, 0, dtype=torch.bool)

        visible = model.masks(at, length, past, no_rows)
        runs = [[kv] for kv in past]
        return model.draft(state[None], token, node_at, visible, runs, self.k)


class StepModule(TreeModule):
    """``step`` for one tree and schedule.

    With the root-only tree and no streams it is ``step_plain``.
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

        # The MSA layers. Fused: with the streams of every node beside it. Otherwise the streams
        # wait until it is known which node counts.
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
                state = seen.states.index_select(1, end)
                drafts = model.draft_after(state, token, length, depth, past, rows, self.k)
        elif model.gamma:
            drafts = no_drafts(predicted[:1], model.gamma, self.k)
        return Step(predicted, depth + 1, drafts, rows, logits)

    def _verify(self, tokens: Tensor, predicted: Tensor) -> Tensor:
        """``[1]``: the deepest node whose whole path agrees with the predictions.

        The lowest index wins a tie.
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
        """The MSA layers over T main rows and T * γ stream rows at once.

        Returns the states of main rows and of streams, and the main rows' new rows.
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
        past_rows = past[0][0].shape[2]

        def streams_see(window: int | None) -> Tensor:
            tree = ancestors & within(at, positions, window)
            seen = torch.cat([committed(at, length, past_rows, window), tree, own], dim=1)
            return seen[None, None]

        of_streams = model.backbone.masks(streams_see)
        both_masks: Masks = {}
        for window, mask in masks.items():
            main_sees = torch.cat([mask, of_main], dim=3)
            both_masks[window] = torch.cat([main_sees, of_streams[window]], dim=2)
        both = torch.cat([h, streams.start(h, gamma)], dim=1)
        where = torch.cat([positions, at])[None]
        with streams.rows_after(size):
            both, new = model.run_top_layers(both, both, where, both_masks, past)
        main_states = both[:, :size]
        stream_states = both[:, size:]
        main_rows = [(keys[:, :, :size], values[:, :, :size]) for keys, values in new]
        return main_states, stream_states, main_rows

    def _streams_of_main(self, size: int, gamma: int) -> Tensor:
        """Additive mask ``[1, 1, T, T * γ]`` of main rows over streams, of which they see none.

        See 2402.11131 eq. 1.
        """
        return torch.full((1, 1, size, size * gamma), self.model.backbone.mask_value)


class PrefillModule(nn.Module):
    """``prefill``: commit a chunk of C prompt tokens.

    The token and drafts of the last chunk start decoding.
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
        state = states.index_select(1, last)
        drafts = model.draft_after(state, token, length, last, past, rows, self.k)
        return Prefill(token, drafts, rows)


def joined(*runs: KeyValue) -> KeyValue:
    """Runs of rows as one, in order.

    Keys and values are ``[B, kv_heads, n, head_dim]`` each, joined along n.
    """
    if len(runs) == 1:
        return runs[0]
    keys, values = zip(*runs, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def no_drafts(token: Tensor, gamma: int, k: int) -> Tensor:
    """Zeros ``[γ, k]``, where the host drafts.

    They are a product of ``token [1]``, because an output of Core ML cannot be a constant.
    """
    return token * torch.zeros(gamma, k, dtype=torch.int32)
