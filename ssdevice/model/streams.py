"""Streams: how they start (2402.11131 eq. 3), and what lossless mode adds to their rows
(*Speculative Streaming: Efficient and Scalable Speculative Decoding with Multi-Stream Attention*,
appendix H.2).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ssdevice.config import Mode, StreamConfig, StreamMLP
from ssdevice.errors import InputError, UnsupportedModelError
from ssdevice.model.backbone import Backbone


@dataclass
class RowSplit:
    """How many leading rows of the current layer call are main rows; None: all of them."""

    main: int | None = None


class LowRank(nn.Module):
    """x -> up(act(down(x))) with ``up`` zero at first, so that training starts from the base."""

    def __init__(self, inputs: int, outputs: int, rank: int, activation: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        self.activation = activation
        nn.init.kaiming_uniform_(self.down.weight, a=5**0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., inputs] -> [.., outputs]``."""
        h = self.down(x)
        return cast(Tensor, self.up(nn.functional.silu(h) if self.activation else h))


def low_rank_factors(model: nn.Module) -> set[nn.Module]:
    """The linears inside the low-rank terms of a model, which targets round otherwise than the
    model's own.
    """
    return {
        factor
        for term in model.modules()
        if isinstance(term, LowRank)
        for factor in term.children()
    }


class StreamRowAdapter(nn.Module):
    """A base module to which stream rows add a low-rank term, or which the term replaces; main rows
    never use it.
    """

    def __init__(self, base: nn.Module, adapter: LowRank, split: RowSplit, replace: bool) -> None:
        super().__init__()
        self.base = base
        self.adapter = adapter
        self.split = split
        self.replace = replace
        self.folded: nn.Linear | None = None

    def fold(self) -> None:
        """Give stream rows a separate weight with the low-rank term added; they compute the same."""
        if self.replace or not isinstance(self.base, nn.Linear):
            return
        base = self.base
        self.folded = nn.Linear(base.in_features, base.out_features, base.bias is not None)
        with torch.no_grad():
            self.folded.weight.copy_(
                base.weight + self.adapter.up.weight @ self.adapter.down.weight
            )
            if base.bias is not None:
                self.folded.bias.copy_(base.bias)

    def _stream(self, x: Tensor) -> Tensor:
        if self.folded is not None:
            return cast(Tensor, self.folded(x))
        low_rank = self.adapter(x)
        return cast(Tensor, low_rank if self.replace else self.base(x) + low_rank)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., R, inputs] -> [.., R, outputs]``; rows before ``split.main`` are main rows."""
        main = self.split.main
        if main is None:
            return cast(Tensor, self.base(x))
        if main == 0:
            return self._stream(x)
        if self.replace:
            return torch.cat([self.base(x[..., :main, :]), self._stream(x[..., main:, :])], dim=-2)
        y = self.base(x)
        return torch.cat(
            [y[..., :main, :], y[..., main:, :] + self.adapter(x[..., main:, :])], dim=-2
        )


def check_draft_ids(ids: Tensor, vocab: int, where: str = "") -> None:
    """Raise InputError, after ``where``, unless ``ids`` are distinct ascending tokens of a
    vocabulary of ``vocab``.
    """
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab or bool((ids[1:] <= ids[:-1]).any()):
        raise InputError(
            f"{where}the draft vocabulary of {len(ids)} tokens is not ascending ids from 0 to {vocab - 1}"
        )


TAPS = 0.27, 0.63, 1.0
"""The shares of the base's layers after which its states are read: 8, 19 and 30 of 30."""


class DraftLayers(nn.Module):
    """Layers that draft one token after the other instead of streams (EAGLE, 2401.15077; EAGLE-3,
    2503.01840).

    ``layers`` start as copies of the base's last one, come after it and have cache rows like its
    own. A committed row reads the fused states of its position, from the base layers ``after``.
    Unlike EAGLE's, its keys and values do not depend on the token chosen next, so a tree's rows are
    known when it is verified. Draft j of node t stands for the row of position t + j, as stream j
    does.
    """

    def __init__(self, backbone: Backbone, count: int) -> None:
        super().__init__()
        width = int(backbone.config.hidden_size)
        self.after = [max(1, round(backbone.num_layers * share)) for share in TAPS]
        self.norms = nn.ModuleList(copy.deepcopy(backbone.norm) for _ in TAPS)
        self.embed_norm = copy.deepcopy(backbone.norm)
        self.norm = copy.deepcopy(backbone.norm)
        self.fuse = nn.Linear(len(TAPS) * width, width, bias=False)
        self.embed = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(backbone.add_layer() for _ in range(count))
        with torch.no_grad():  # at first it is the state after the last layer, normed
            self.fuse.weight[:, :-width].zero_()
            self.fuse.weight[:, -width:].copy_(torch.eye(width))
            self.embed.weight.zero_()
        self.requires_grad_(True)

    def fused(self, states: Tensor) -> Tensor:
        """What a row reads, ``[B, R, D]``, of its states after the layers ``after``, ``[B, R, 3
        D]``.
        """
        normed = [
            norm(h) for norm, h in zip(self.norms, states.chunk(len(TAPS), dim=-1), strict=True)
        ]
        return cast(Tensor, self.fuse(torch.cat(normed, dim=-1)))

    def start(self, state: Tensor, chosen: Tensor) -> Tensor:
        """A draft's state before the layers, ``[B, n, D]``: that of the row or draft before it,
        ``state [B, n, D]``, and the embedding of the token after that, ``chosen [B, n, D]``.
        """
        return state + cast(Tensor, self.embed(self.embed_norm(chosen)))


class Streams(nn.Module):
    """Stream identifier embeddings P, the transformations f and g, and the stream adapters.

    In lossless mode the constructor wraps linears and MLPs of the top ``msa_layers`` layers of
    ``backbone``, as ``stream_mlp`` says, in StreamRowAdapter. g, by which streams see the token
    just chosen, and ``follow``, by which a draft sees the one before it, are not in the paper (see
    StreamConfig). Without MSA layers there are ``heads`` on the last hidden state, which share the
    LM head, or ``own`` layers. ``draft_ids [n] int32``: the ascending tokens of the draft
    vocabulary.
    """

    draft_ids: Tensor

    def __init__(self, backbone: Backbone, config: StreamConfig) -> None:
        super().__init__()
        config.check_layers(backbone.num_layers)
        self.config = config
        self.vocab = int(backbone.config.vocab_size)
        width = int(backbone.config.hidden_size)
        self.split = RowSplit()
        self.identifiers = nn.Parameter(torch.randn(config.gamma, width) * 0.02)
        if config.draft_vocabulary:
            check_draft_ids(torch.arange(config.draft_vocabulary, device="cpu"), self.vocab)
            self.register_buffer(
                "draft_ids", torch.arange(config.draft_vocabulary, dtype=torch.int32)
            )
        self.f = LowRank(width, width, config.init_rank) if config.init_rank else None
        self.token = (
            LowRank(2 * width, config.gamma * width, config.token_rank)
            if config.token_rank
            else None
        )
        finished = int(backbone.lm_head.in_features)
        rank = config.follow_rank
        self.follow = LowRank(finished + width, finished, rank, activation=True) if rank else None
        self.own = DraftLayers(backbone, config.draft_layers) if config.draft_layers else None
        heads = 0 if config.msa_layers or config.draft_layers else config.gamma
        self.heads = nn.ModuleList(
            LowRank(width, width, config.adapter_rank, activation=True) for _ in range(heads)
        )
        self.adapters = nn.ModuleDict()
        self._rows: list[
            StreamRowAdapter
        ] = []  # a plain list, because they are submodules of the layers
        if config.mode is Mode.LOSSLESS and not config.draft_layers:
            for i in range(backbone.num_layers - config.msa_layers, backbone.num_layers):
                self._wrap(backbone.layers[i], i)

    @contextmanager
    def rows_after(self, main: int) -> Iterator[None]:
        """In this context the layers run on ``main`` main rows followed by stream rows."""
        self.split.main = main
        try:
            yield
        finally:
            self.split.main = None

    def moved(self, h: Tensor) -> Tensor:
        """f(M) of states ``[.., D]``: UVM, or M itself (2402.11131 eq. 3)."""
        return h if self.f is None else cast(Tensor, self.f(h))

    def start(self, h: Tensor, gamma: int, chosen: Tensor | None = None) -> Tensor:
        """S_tj = f(M_t) + P_j at layer N - N_s: ``[B, n, D] -> [B, n * γ, D]``, grouped by node.

        With ``token_rank``, ``chosen [B, n, D]`` embeds the tokens E after the nodes, and stream j
        adds its part of g(M_t, E), ``[.., 2 D] -> [.., γ D]``.
        """
        batch, nodes, width = h.shape
        shared = self.moved(h)
        starts = shared[:, :, None] + self.identifiers[:gamma].to(h.dtype)
        if self.token is not None:
            assert chosen is not None
            own = self.token(torch.cat([h, chosen], dim=-1)).reshape(batch, nodes, -1, width)
            starts = starts + (own[:, :, :gamma] if gamma < self.config.gamma else own)
        if self.heads:
            starts = starts + torch.stack([head(shared) for head in self.heads[:gamma]], dim=2)
        return starts.reshape(batch, nodes * gamma, width)

    def after(self, finished: Tensor, before: Tensor) -> Tensor:
        """What the head reads of streams ``finished [.., W]`` if ``before [.., D]`` embeds the
        token before theirs.
        """
        if self.follow is None:
            return finished
        return finished + cast(Tensor, self.follow(torch.cat([finished, before], dim=-1)))

    def own_terms(self) -> list[LowRank]:
        """f, g, heads and ``follow``, which read hidden states that no norm has evened, or
        embeddings beside them.

        They stay floats in every quantization: in eight bits a row of [M; E] would be its outliers
        and no E.
        """
        return [
            term
            for term in (self.f, self.token, *self.heads, self.follow)
            if isinstance(term, LowRank)
        ]

    def fold(self) -> list[nn.Linear]:
        """Fold stream adapters into second weights of the MSA layers, which are returned: for
        graphs whose streams run separately, one product instead of three, for a copy of these
        layers' weights.
        """
        for row in self._rows:
            row.fold()
        return [row.folded for row in self._rows if row.folded is not None]

    def _wrap(self, layer: nn.Module, index: int) -> None:
        config = self.config
        replace_mlp = config.stream_mlp is not StreamMLP.BASE_ADAPTER
        only = config.stream_mlp is StreamMLP.ADAPTER_ONLY
        if replace_mlp and not isinstance(getattr(layer, "mlp", None), nn.Module):
            raise UnsupportedModelError(
                f"stream_mlp '{config.stream_mlp}' needs an mlp module; use 'base+adapter'"
            )
        replaced = set(cast(nn.Module, layer.mlp).modules()) if replace_mlp else set()
        adapters: dict[str, LowRank] = {}
        for path, linear in layer.named_modules():
            if isinstance(linear, nn.Linear) and linear not in replaced and not only:
                adapters[path] = LowRank(
                    linear.in_features, linear.out_features, config.adapter_rank
                )
        if replace_mlp:
            width = int(self.identifiers.shape[1])
            adapters["mlp"] = LowRank(width, width, config.adapter_rank, activation=not only)
        for path, adapter in adapters.items():
            owner, _, name = path.rpartition(".")
            row = StreamRowAdapter(
                layer.get_submodule(path), adapter, self.split, replace_mlp and path == "mlp"
            )
            setattr(layer.get_submodule(owner), name, row)
            self._rows.append(row)
            self.adapters[f"{index}-{path.replace('.', '-')}"] = adapter
