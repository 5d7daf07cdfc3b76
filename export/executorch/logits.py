"""An ExecuTorch engine that shows its logits, to tell near-ties from faults, for programs exported with them."""

from __future__ import annotations

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import PLAIN
from ssdevice.export.logits import LogitsConversation
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import LOGITS, ExecutorchEngine


class LogitsEngine(ExecutorchEngine):
    """An ExecutorchEngine whose conversations keep the logits of the last step's tokens."""

    shows_logits = True

    def new_conversation(self, beside: Conversation | None = None) -> LogitsConversation:
        return LogitsConversation(self, beside, LOGITS)


def open_logits(bundle: Bundle, app: str | None, options: EngineOptions) -> LogitsEngine | None:
    """The engine of an app with logits; None for a program that was exported without them."""
    engine = LogitsEngine.of(bundle, app, options)
    if LOGITS in engine.outputs(PLAIN):
        return engine
    engine.close()
    return None
