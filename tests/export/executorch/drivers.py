"""Conversations with ExecuTorch programs as the conformance run drives them."""

from __future__ import annotations

from collections.abc import Sequence

from ssdevice.runtime.executorch.engine import Array, ExecutorchConversation
from tests.conformance.oracle import Drafts, StepOutput


class OracleDriver:
    """A conversation as ``tests.conformance.oracle.Driver``."""

    def __init__(self, conversation: ExecutorchConversation, windows: Sequence[int] = ()) -> None:
        self.conversation, self.windows = conversation, windows
        g = conversation.geometry
        self.tree, self.gamma, self.k = g.tree, g.gamma, g.k
        self.vocab, self.context, self.chunk = g.vocab, g.context, g.chunk

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        self.conversation.length = length
        root = self.conversation.prefill(tokens)
        return root, self.conversation.drafts.tolist()

    def step(self, root: int, drafts: Drafts, length: int) -> StepOutput:
        self.conversation.length = length
        self.conversation.drafts[:] = drafts
        tokens = self.conversation.step(root)
        padded = [*tokens, *[0] * (self.tree.emitted - len(tokens))]
        return StepOutput(padded, len(tokens), self.conversation.drafts.tolist())

    def plain(self, root: int, length: int) -> int:
        self.conversation.length = length
        return self.conversation.step_plain(root)

    def rows(self, start: int, end: int) -> Array:
        return self.conversation.rows(start, end)
