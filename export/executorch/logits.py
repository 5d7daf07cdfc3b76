"""The ExecuTorch engine with its logits shown, for telling near-ties from faults: programs give them as an output."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.runtime.executorch.engine import ExecutorchConversation, ExecutorchEngine
from ssdevice.runtime.generation import emitted_nodes


class LogitsEngine(ExecutorchEngine):
    """An ExecutorchEngine whose conversations keep the logits of what the last step emitted."""

    def new_conversation(self) -> LogitsConversation:
        return LogitsConversation(self)


class LogitsConversation(ExecutorchConversation):
    """``logits [emitted, vocab]``: what the last ``step`` or ``step_plain`` chose its tokens from."""

    def __init__(self, engine: LogitsEngine) -> None:
        super().__init__(engine)
        self.logits: NDArray[np.float32] = np.zeros((0, engine.geometry.vocab), np.float32)

    def step(self, root: int) -> list[int]:
        drafts = self.drafts.tolist()
        tokens = super().step(root)
        self.logits = self.logits[emitted_nodes(self.geometry.tree, drafts, tokens)]
        return tokens

    def _see(self, logits: NDArray[Any]) -> None:
        self.logits = logits.copy()
