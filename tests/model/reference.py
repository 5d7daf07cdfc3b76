"""Reference decoding in torch: the modules that every export traces, driven by the loop of the
runtime.

An answer ends, in plain and speculative decoding alike, after a stop token, at ``max_tokens``, or
when the cache is full. A step may run while fewer than ``context`` tokens are committed, and only
the first ``context - length`` of its tokens count. So a prompt of p tokens gives at most 1 +
context - p tokens: one from prefill and one for each free row, the last of which never enters the
cache. After every step the committed rows are those of the prompt and of all emitted tokens but the
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssdevice.config import Schedule
from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.export.parity.reference import Cache, int32
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.tree import Tree


@dataclass(frozen=True)
class Decoded:
    """Tokens, and how many each step emitted; the first token is prefill's and of no step."""

    tokens: list[int]
    steps: list[int] = field(default_factory=list)


class Reference:
    """Decodes with one model, tree and schedule.

    ``plain`` and ``speculative`` give the same tokens.
    """

    def __init__(
        self,
        model: StreamModel,
        tree: Tree,
        k: int,
        schedule: Schedule,
        context: int,
        chunk: int = 64,
    ) -> None:
        self.model = model
        self.tree = tree
        self.context = context
        self.chunk = chunk
        self.step = StepModule(model, tree, k, schedule)
        plain_model = model.plain()
        self.step_plain = StepModule(plain_model, Tree.root_only(), 1, Schedule.DEFERRED)
        self.prefill = PrefillModule(model, chunk, k)

    def new_cache(self) -> Cache:
        """An empty cache for one conversation."""
        rows = self.context + max(self.chunk, self.tree.emitted)
        backbone = self.model.backbone
        return Cache(
            torch.zeros(len(backbone.layers), 2, 1, backbone.kv_heads, rows, backbone.head_dim)
        )

    @torch.no_grad()
    def start(self, prompt: Sequence[int], cache: Cache) -> tuple[int, Tensor]:
        """Prefill: the first output token and the first drafts.

        Raises InputError for an empty prompt, ContextOverflowError for one that does not fit what
        is left.
        """
        if not prompt:
            raise InputError("the prompt is empty")
        if cache.length + len(prompt) > self.context:
            left = self.context - cache.length
            raise ContextOverflowError(
                f"the prompt has {len(prompt)} tokens, "
                f"but of a context of {self.context} only {left} are left"
            )
        for at in range(0, len(prompt), self.chunk):
            chunk = list(prompt[at : at + self.chunk])
            tokens = torch.tensor(chunk + [0] * (self.chunk - len(chunk)), dtype=torch.int32)
            out = self.prefill(tokens, int32(len(chunk)), int32(cache.length), cache.past())
            cache.commit(out.rows, len(chunk))
        return int(out.token), out.drafts

    @torch.no_grad()
    def speculative(
        self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()
    ) -> Decoded:
        """Greedy tokens with drafting, the stop token included."""
        cache = self.new_cache()
        first, drafts = self.start(prompt, cache)
        result = Decoded([first])
        while room := self._room(result, cache, max_tokens, stop):
            out = self.step(int32(result.tokens[-1]), drafts, int32(cache.length), cache.past())
            run = until(out.tokens[: int(out.count)].tolist(), stop)[:room]
            cache.commit(out.rows, len(run))
            result.tokens.extend(run)
            result.steps.append(len(run))
            drafts = out.drafts
        return result

    @torch.no_grad()
    def plain(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> Decoded:
        """Greedy tokens one by one through the T = 1 step."""
        cache = self.new_cache()
        first, _ = self.start(prompt, cache)
        result = Decoded([first])
        none = torch.zeros(0, 1, dtype=torch.int32)
        while self._room(result, cache, max_tokens, stop):
            out = self.step_plain(int32(result.tokens[-1]), none, int32(cache.length), cache.past())
            cache.commit(out.rows, 1)
            result.tokens.append(int(out.tokens[0]))
            result.steps.append(1)
        return result

    def _room(self, result: Decoded, cache: Cache, max_tokens: int, stop: Sequence[int]) -> int:
        """How many more tokens may follow; 0 ends the answer. Prefill's token is always given."""
        if result.tokens[-1] in stop:
            return 0
        return max(0, min(max_tokens - len(result.tokens), self.context - cache.length))


def until(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop:
            return tokens[: i + 1]
    return tokens
