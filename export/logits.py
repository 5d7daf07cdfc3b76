"""Conversations that keep logits, to tell near-ties from faults."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.contract import LOGITS, PLAIN, STEP
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine, Outputs
from ssdevice.runtime.generation import emitted_nodes


class LogitsConversation(Conversation):
    """``logits [emitted, vocab]``: those from which the last ``step`` or ``step_plain`` chose its tokens.

    ``tensor``: the output of both functions that holds the logits ``[nodes, vocab]``.
    """

    def __init__(self, engine: Engine, beside: Conversation | None, tensor: str) -> None:
        super().__init__(engine, beside)
        self._tensor = tensor
        self.logits: NDArray[np.float32] = np.zeros((0, engine.geometry.vocab), np.float32)

    def step(self, last: int) -> list[int]:
        drafts = self.drafts.tolist()
        tokens = super().step(last)
        self.logits = self.logits[emitted_nodes(self.geometry.tree, drafts, tokens)]
        return tokens

    def _call(self, function: str, length: int | None = None) -> Outputs:
        out = super()._call(function, length)
        if function in (STEP, PLAIN):
            logits: NDArray[Any] = out[self._tensor]
            self.logits = logits.reshape(-1, self.geometry.vocab).copy()
        return out


class ShowsLogits(Engine):
    """An engine whose conversations keep the logits of the last step's tokens. ``shown``: the output with them."""

    shown = LOGITS

    def new_conversation(self, beside: Conversation | None = None) -> LogitsConversation:
        return LogitsConversation(self, beside, self.shown)
