"""The oracle's driver over the torch modules: a static cache that starts full of garbage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ssdevice.config import Schedule
from ssdevice.model.attention import KeyValue
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.tree import Tree
from tests.conformance.oracle import Drafts, StepOutput


class TorchDriver:
    """step, prefill and step_plain of one model, tree and schedule (see
    ``tests.conformance.oracle.Driver``).
    """

    def __init__(
        self, model: StreamModel, tree: Tree, k: int, schedule: Schedule, context: int, chunk: int
    ) -> None:
        self.model = model
        self.tree = tree
        self.k = k
        self.context = context
        self.chunk = chunk
        self.gamma = model.gamma
        backbone = model.backbone
        self.vocab = int(backbone.config.vocab_size)
        self.windows = [window for window in backbone.windows() if window is not None]
        self.step_module = StepModule(model, tree, k, schedule)
        self.plain_module = StepModule(model.plain(), Tree.root_only(), 1, Schedule.DEFERRED)
        self.prefill_module = PrefillModule(model, chunk, k)
        rows = context + max(chunk, tree.emitted)
        shape = (len(backbone.layers), 2, 1, backbone.kv_heads, rows, backbone.head_dim)
        self.cache = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(9))

    def past(self) -> list[KeyValue]:
        """All rows of the cache, valid or not."""
        return [(layer[0], layer[1]) for layer in self.cache]

    def _commit(self, rows: Sequence[KeyValue], length: int) -> None:
        for layer, (keys, values) in zip(self.cache, rows, strict=True):
            layer[0, :, :, length : length + keys.shape[2]] = keys
            layer[1, :, :, length : length + keys.shape[2]] = values

    @torch.no_grad()
    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """The padding is garbage too, and its rows are written beyond the valid ones."""
        padded = list(tokens) + [(7 * i + 3) % self.vocab for i in range(self.chunk - len(tokens))]
        out = self.prefill_module(int32(*padded), int32(len(tokens)), int32(length), self.past())
        self._commit(out.rows, length)
        return int(out.token), out.drafts.tolist()

    @torch.no_grad()
    def step(self, root: int, drafts: Drafts, length: int) -> StepOutput:
        """All A rows are written, valid or not."""
        given = torch.tensor(drafts, dtype=torch.int32).reshape(self.gamma, self.k)
        out = self.step_module(int32(root), given, int32(length), self.past())
        self._commit(out.rows, length)
        return StepOutput(out.tokens.tolist(), int(out.count), out.drafts.tolist())

    @torch.no_grad()
    def plain(self, root: int, length: int) -> int:
        """The T = 1 step without streams."""
        none = torch.zeros(0, 1, dtype=torch.int32)
        out = self.plain_module(int32(root), none, int32(length), self.past())
        self._commit(out.rows, length)
        return int(out.tokens[0])

    def rows(self, start: int, end: int) -> np.ndarray[Any, Any]:
        """``[layers, 2, 1, kv_heads, end - start, head_dim]``."""
        return self.cache[:, :, :, :, start:end].numpy().copy()


def int32(*values: int) -> torch.Tensor:
    """The integers of the contract as a vector."""
    return torch.tensor(values, dtype=torch.int32)
