"""The ExecuTorch engine with its logits shown, for telling near-ties from faults: programs give them as an output."""

from __future__ import annotations

from ssdevice.export.logits import LogitsConversation
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Cache, Inputs
from ssdevice.runtime.executorch.engine import LOGITS, ExecutorchCache, ExecutorchEngine


class LogitsEngine(ExecutorchEngine):
    """An ExecutorchEngine whose conversations keep the logits of what the last step emitted."""

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> ExecutorchCache:
        cache = super().new_cache(inputs, beside)
        cache.logits = True
        return cache

    def new_conversation(self, beside: Conversation | None = None) -> LogitsConversation:
        return LogitsConversation(self, beside, LOGITS)
