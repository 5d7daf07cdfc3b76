"""Streams: how they start, and what lossless mode adds to their rows.

Sources: 2402.11131 eq. 3 for the start, and for lossless mode appendix H.2 of *Speculative
Streaming: Efficient and Scalable Speculative Decoding with Multi-Stream Attention*.
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
    """How many leading rows of the current layer call are main rows; None: all of them.

    Every StreamRowAdapter of a model holds the same object, see ``Streams.rows_after``.
    """

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
        if self.activation:
            h = nn.functional.silu(h)
        return cast(Tensor, self.up(h))


def low_rank_factors(model: nn.Module) -> set[nn.Module]:
    """The linears inside the low-rank terms of a model.

    Targets round them otherwise than the model's own linears.
    """
    factors = set[nn.Module]()
    for term in model.modules():
        if isinstance(term, LowRank):
            factors.update(term.children())
    return factors


class StreamRowAdapter(nn.Module):
    """A base module with a low-rank term for stream rows; main rows never use the term.

    For stream rows the term is added to the base's output, or with ``replace`` stands in its place.
    """

    def __init__(self, base: nn.Module, adapter: LowRank, split: RowSplit, replace: bool) -> None:
        super().__init__()
        self.base = base
        self.adapter = adapter
        self.split = split
        self.replace = replace
        self.folded: nn.Linear | None = None

    def fold(self) -> None:
        """Give stream rows a weight of their own that includes the low-rank term."""
        if self.replace or not isinstance(self.base, nn.Linear):
            return
        base = self.base
        self.folded = nn.Linear(base.in_features, base.out_features, base.bias is not None)
        with torch.no_grad():
            term = self.adapter.up.weight @ self.adapter.down.weight
            self.folded.weight.copy_(base.weight + term)
            if base.bias is not None:
                self.folded.bias.copy_(base.bias)

    def _stream(self, x: Tensor) -> Tensor:
        """``[.., R, inputs] -> [.., R, outputs]`` of stream rows only."""
        if self.folded is not None:
            return cast(Tensor, self.folded(x))
        term = self.adapter(x)
        if self.replace:
            return cast(Tensor, term)
        return cast(Tensor, self.base(x) + term)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., R, inputs] -> [.., R, outputs]``; rows before ``split.main`` are main rows."""
        main = self.split.main
        if main is None:
            return cast(Tensor, self.base(x))
        if main == 0:
            return self._stream(x)
        if self.replace:
            return torch.cat([self.base(x[..., :main, :]), self._stream(x[..., main:, :])], dim=-2)
        # One product of the base for all rows; the term is added to the stream rows.
        y = self.base(x)
        streams = y[..., main:, :] + self.adapter(x[..., main:, :])
        return torch.cat([y[..., :main, :], streams], dim=-2)


def check_draft_ids(ids: Tensor, vocab: int, where: str = "") -> None:
    """Raise InputError unless ``ids`` are distinct ascending tokens of a vocabulary of ``vocab``.

    ``where``: how the message begins.
    """
    ascending = not bool((ids[1:] <= ids[:-1]).any())
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab or not ascending:
        raise InputError(
            f"{where}the draft vocabulary of {len(ids)} tokens is not ascending ids "
            f"from 0 to {vocab - 1}"
        )


TAPS = (0.27, 0.63, 1.0)
"""The shares of the base's layers after which its states are read: 8, 19 and 30 of 30."""


class DraftLayers(nn.Module):
    """Layers that draft one token after the other, instead of streams.

    They follow EAGLE (2401.15077) and EAGLE-3 (2503.01840). ``layers`` start as copies of the
    base's last one, come after it and have cache rows like its own.

    A committed row reads the fused states of its position, from the base layers ``after``. Unlike
    EAGLE's, its keys and values do not depend on the token chosen next, so a tree's rows are known
    when it is verified. Draft j of node t has the position t + j, as stream j has.
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
        # At first the fused state is the state after the last layer, normed, without the embedding.
        with torch.no_grad():
            self.fuse.weight[:, :-width].zero_()
            self.fuse.weight[:, -width:].copy_(torch.eye(width))
            self.embed.weight.zero_()
        self.requires_grad_(True)

    def fused(self, states: Tensor) -> Tensor:
        """Fused states ``[B, R, D]`` of a row's states after each layer of ``after``, ``[B, R, 3
        D]``.
        """
        parts = states.chunk(len(TAPS), dim=-1)
        normed = [norm(h) for norm, h in zip(self.norms, parts, strict=True)]
        return cast(Tensor, self.fuse(torch.cat(normed, dim=-1)))

    def start(self, state: Tensor, chosen: Tensor) -> Tensor:
        """A draft's state before the layers, ``[B, n, D]``.

        ``state [B, n, D]``: of the row or draft before it. ``chosen [B, n, D]``: the embedding of
        the token after that row or draft.
        """
        return state + cast(Tensor, self.embed(self.embed_norm(chosen)))


class Streams(nn.Module):
    """What streams consist of, as a StreamConfig says.

    - ``identifiers``: the stream identifier embeddings P, ``[γ, D]``.
    - ``f``: the transformation of a node's state; None is the identity.
    - ``token``: g, by which streams see the token just chosen (not in the paper).
    - ``follow``: the term by which a draft sees the draft before it (not in the paper).
    - ``adapters``: the low-rank terms of lossless mode. The constructor wraps the linears and MLPs
      of the top ``msa_layers`` layers of ``backbone``, as ``stream_mlp`` says, in StreamRowAdapter.
    - ``heads``: without MSA layers, terms on the last hidden state; they share the LM head.
    - ``own``: layers that draft instead of streams.
    - ``draft_ids [n] int32``: the ascending tokens of the draft vocabulary, if there is one.
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
            ids = torch.arange(config.draft_vocabulary, dtype=torch.int32)
            self.register_buffer("draft_ids", ids)
        # The order in which terms are made decides which random numbers each begins with.
        self.f: LowRank | None = None
        self.token: LowRank | None = None
        self.follow: LowRank | None = None
        self.own: DraftLayers | None = None
        if config.init_rank:
            self.f = LowRank(width, width, config.init_rank)
        if config.token_rank:
            self.token = LowRank(2 * width, config.gamma * width, config.token_rank)
        if config.follow_rank:
            finished = int(backbone.lm_head.in_features)
            self.follow = LowRank(finished + width, finished, config.follow_rank, activation=True)
        if config.draft_layers:
            self.own = DraftLayers(backbone, config.draft_layers)
        heads = 0 if config.msa_layers or config.draft_layers else config.gamma
        self.heads = nn.ModuleList(
            LowRank(width, width, config.adapter_rank, activation=True) for _ in range(heads)
        )
        self.adapters = nn.ModuleDict()
        # A plain list, because these modules belong to the layers.
        self._rows: list[StreamRowAdapter] = []
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
        if self.f is None:
            return h
        return cast(Tensor, self.f(h))

    def start(self, h: Tensor, gamma: int, chosen: Tensor | None = None) -> Tensor:
        """S_tj = f(M_t) + P_j at layer N - N_s: ``[B, n, D] -> [B, n * γ, D]``, grouped by node.

        ``chosen [B, n, D]``: with g, the embeddings E of the tokens after the nodes. Stream j then
        adds its part of g(M_t, E), ``[.., 2 D] -> [.., γ D]``.
        """
        batch, nodes, width = h.shape
        shared = self.moved(h)
        starts = shared[:, :, None] + self.identifiers[:gamma].to(h.dtype)
        if self.token is not None:
            assert chosen is not None
            parts = self.token(torch.cat([h, chosen], dim=-1)).reshape(batch, nodes, -1, width)
            if gamma < self.config.gamma:
                parts = parts[:, :, :gamma]
            starts = starts + parts
        if self.heads:
            starts = starts + torch.stack([head(shared) for head in self.heads[:gamma]], dim=2)
        return starts.reshape(batch, nodes * gamma, width)

    def after(self, finished: Tensor, before: Tensor) -> Tensor:
        """What the head reads of streams, ``[.., W]``, if they see the draft before theirs.

        ``finished [.., W]``: what it would read without. ``before [.., D]``: the embedding of the
        token before each stream's.
        """
        if self.follow is None:
            return finished
        return finished + cast(Tensor, self.follow(torch.cat([finished, before], dim=-1)))

    def own_terms(self) -> list[LowRank]:
        """f, g, heads and ``follow``: they read states that no norm has evened, or embeddings.

        They stay floats in every quantization: in eight bits, a row [M; E] would be M's outliers,
        and E would round to zeros.
        """
        terms = (self.f, self.token, *self.heads, self.follow)
        return [term for term in terms if isinstance(term, LowRank)]

    def fold(self) -> list[nn.Linear]:
        """Fold stream adapters into second weights of the MSA layers, and return these.

        It is for graphs whose streams run separately: one product instead of three, at the price of
        a copy of these layers' weights.
        """
        for row in self._rows:
            row.fold()
        return [row.folded for row in self._rows if row.folded is not None]

    def _wrap(self, layer: nn.Module, index: int) -> None:
        """Put a StreamRowAdapter around each part of a layer that streams compute otherwise."""
        config = self.config
        replace_mlp = config.stream_mlp is not StreamMLP.BASE_ADAPTER
        only = config.stream_mlp is StreamMLP.ADAPTER_ONLY
        replaced = set[nn.Module]()
        if replace_mlp:
            if not isinstance(getattr(layer, "mlp", None), nn.Module):
                raise UnsupportedModelError(
                    f"stream_mlp '{config.stream_mlp}' needs an mlp module; use 'base+adapter'"
                )
            replaced.update(cast(nn.Module, layer.mlp).modules())
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
                base=layer.get_submodule(path),
                adapter=adapter,
                split=self.split,
                replace=replace_mlp and path == "mlp",
            )
            setattr(layer.get_submodule(owner), name, row)
            self._rows.append(row)
            self.adapters[f"{index}-{path.replace('.', '-')}"] = adapter
