"""A conversation with any engine as the parity gate drives it, and as the conformance run does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ssdevice.export.parity import StepOut
from tests.conformance.oracle import Drafts, StepOutput


class GateDriver:
    """See ``ssdevice.export.parity.Driver``."""

    def __init__(self, conversation: Any) -> None:
        self.conversation = conversation

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        self.conversation.length = length
        return self.conversation.prefill(tokens), self.conversation.drafts.tolist()

    def step(self, root: int, drafts: Drafts, length: int) -> StepOut:
        self.conversation.length = length
        self.conversation.drafts[:] = drafts
        return StepOut(self.conversation.step(root), self.conversation.drafts.tolist())

    def plain(self, root: int, length: int) -> int:
        self.conversation.length = length
        token: int = self.conversation.step_plain(root)
        return token

    def rows(self, start: int, end: int) -> np.ndarray[Any, Any]:
        return np.array(self.conversation.rows(start, end))


class OracleDriver(GateDriver):
    """See ``tests.conformance.oracle.Driver``."""

    def __init__(self, conversation: Any, windows: Sequence[int] = ()) -> None:
        super().__init__(conversation)
        g = conversation.geometry
        self.tree, self.gamma, self.k, self.windows = g.tree, g.gamma, g.k, windows
        self.vocab, self.context, self.chunk = g.vocab, g.context, g.chunk

    def step(self, root: int, drafts: Drafts, length: int) -> StepOutput:  # type: ignore[override]
        out = super().step(root, drafts, length)
        return StepOutput([*out.tokens, *[0] * (self.tree.emitted - len(out.tokens))], len(out.tokens), out.drafts)
