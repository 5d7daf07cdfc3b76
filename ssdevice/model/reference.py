"""Reference decoding in torch: the same modules as every export, driven by the same fifteen lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssdevice.config import Schedule
from ssdevice.model.attention import KeyValue
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.tree import Tree


@dataclass
class Cache:
    """Committed rows, ``[layers, 2, 1, kv_heads, capacity, head_dim]``, and how many are valid."""

    rows: Tensor
    length: int = 0

    def past(self) -> list[KeyValue]:
        """Per layer (keys, values) of the valid rows, rounded up so that there is always one."""
        end = max(self.length, 1)
        return [(layer[0][:, :, :end], layer[1][:, :, :end]) for layer in self.rows]

    def commit(self, rows: Sequence[KeyValue], count: int) -> None:
        """Append the first ``count`` of the new rows of every layer."""
        for layer, (keys, values) in zip(self.rows, rows, strict=True):
            layer[0, :, :, self.length : self.length + count] = keys[:, :, :count]
            layer[1, :, :, self.length : self.length + count] = values[:, :, :count]
        self.length += count


@dataclass(frozen=True)
class Generation:
    """Tokens, and how many each step emitted (prefill's token is the first and belongs to no step)."""

    tokens: list[int]
    steps: list[int] = field(default_factory=list)


class Reference:
    """Decodes with one model, tree and schedule. ``plain`` and ``speculative`` give the same tokens."""

    def __init__(
        self, model: StreamModel, tree: Tree, k: int, schedule: Schedule, context: int, chunk: int = 64
    ) -> None:
        self.model, self.tree, self.context, self.chunk = model, tree, context, chunk
        self.step = StepModule(model, tree, k, schedule)
        plain_model = StreamModel(model.backbone, None, 0)
        self.step_plain = StepModule(plain_model, Tree.root_only(), 1, Schedule.DEFERRED)
        self.prefill = PrefillModule(model, chunk, k)
        config = model.backbone.config
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def new_cache(self) -> Cache:
        """An empty cache for one conversation."""
        rows = self.context + max(self.chunk, self.tree.emitted)
        return Cache(torch.zeros(self.model.backbone.num_layers, 2, 1, self.kv_heads, rows, self.head_dim))

    @torch.no_grad()
    def start(self, prompt: Sequence[int], cache: Cache) -> tuple[int, Tensor]:
        """Prefill: the first output token and the first drafts."""
        for at in range(0, len(prompt), self.chunk):
            chunk = list(prompt[at : at + self.chunk])
            tokens = torch.tensor(chunk + [0] * (self.chunk - len(chunk)), dtype=torch.int32)
            out = self.prefill(tokens, int32(len(chunk)), int32(cache.length), cache.past())
            cache.commit(out.rows, len(chunk))
        return int(out.root), out.drafts

    @torch.no_grad()
    def speculative(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> Generation:
        """Greedy tokens with drafting, the stop token included."""
        cache = self.new_cache()
        root, drafts = self.start(prompt, cache)
        result = Generation([root])
        while result.tokens[-1] not in stop and len(result.tokens) < max_tokens and cache.length < self.context:
            out = self.step(int32(root), drafts, int32(cache.length), cache.past())
            count, tokens, drafts = int(out.count), out.tokens.tolist(), out.drafts
            cache.commit(out.rows, count)
            root = tokens[count - 1]
            room = min(max_tokens - len(result.tokens), self.context + count - cache.length)
            kept = until(tokens[:count], stop)[:room]
            result.tokens.extend(kept)
            result.steps.append(len(kept))
        return result

    @torch.no_grad()
    def plain(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> Generation:
        """Greedy tokens one by one through the T = 1 step."""
        cache = self.new_cache()
        root, _ = self.start(prompt, cache)
        result = Generation([root])
        none = torch.zeros(0, 1, dtype=torch.int32)
        while result.tokens[-1] not in stop and len(result.tokens) < max_tokens and cache.length < self.context:
            out = self.step_plain(int32(root), none, int32(cache.length), cache.past())
            cache.commit(out.rows, 1)
            root = int(out.tokens[0])
            result.tokens.append(root)
            result.steps.append(1)
        return result


def int32(value: int) -> Tensor:
    """A contract integer: shape [1]."""
    return torch.tensor([value], dtype=torch.int32)


def until(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop:
            return tokens[: i + 1]
    return tokens
