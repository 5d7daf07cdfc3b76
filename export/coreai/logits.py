"""A Core AI engine that shows its logits, to tell near-ties from faults."""

from __future__ import annotations

from ssdevice.export.logits import LogitsConversation
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.coreai.engine import LOGITS, CoreAIEngine


class LogitsEngine(CoreAIEngine):
    """A CoreAIEngine whose conversations keep the logits of the last step's tokens."""

    shows_logits = True

    def new_conversation(self, beside: Conversation | None = None) -> LogitsConversation:
        return LogitsConversation(self, beside, LOGITS)
