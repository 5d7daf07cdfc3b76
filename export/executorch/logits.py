"""The ExecuTorch engine with its logits shown, for telling near-ties from faults; programs give them if asked to."""

from __future__ import annotations

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import PLAIN
from ssdevice.export.logits import LogitsConversation
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Cache, EngineOptions, Inputs
from ssdevice.runtime.executorch.engine import LOGITS, ExecutorchCache, ExecutorchEngine


class LogitsEngine(ExecutorchEngine):
    """An ExecutorchEngine whose conversations keep the logits of what the last step emitted."""

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> ExecutorchCache:
        cache = super().new_cache(inputs, beside)
        cache.logits = True
        return cache

    def new_conversation(self, beside: Conversation | None = None) -> LogitsConversation:
        return LogitsConversation(self, beside, LOGITS)


def open_logits(bundle: Bundle, app: str | None, options: EngineOptions) -> LogitsEngine | None:
    """The engine of an app with its logits shown; None for a program that was exported without them."""
    engine = LogitsEngine.of(bundle, app, options)
    if LOGITS in engine.outputs(PLAIN):
        return engine
    engine.close()
    return None
