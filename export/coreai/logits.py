"""A Core AI engine that shows its logits, to tell near-ties from faults."""

from __future__ import annotations

from ssdevice.export.logits import ShowsLogits
from ssdevice.runtime.coreai.engine import CoreAIEngine


class LogitsEngine(ShowsLogits, CoreAIEngine):
    """A CoreAIEngine that shows logits."""

    shows_logits = True
