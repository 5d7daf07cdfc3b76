"""The ExecuTorch engine with its logits shown, for telling near-ties from faults; programs give them if asked to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import PLAIN
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import LOGITS, ExecutorchConversation, ExecutorchEngine
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

    def _see(self, out: Mapping[str, NDArray[Any]]) -> None:
        self.logits = out[LOGITS].copy()


def open_logits(bundle: Bundle, app: str | None, options: EngineOptions) -> LogitsEngine | None:
    """The engine of an app with its logits shown; None for a program that was exported without them."""
    engine = LogitsEngine.of(bundle, app, options)
    if LOGITS in engine.outputs(PLAIN):
        return engine
    engine.close()
    return None
