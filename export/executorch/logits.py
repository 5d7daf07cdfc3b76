"""An ExecuTorch engine that shows its logits, to tell near-ties from faults, for programs exported with them."""

from __future__ import annotations

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import LOGITS, PLAIN
from ssdevice.export.logits import ShowsLogits
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import ExecutorchEngine


class LogitsEngine(ShowsLogits, ExecutorchEngine):
    """An ExecutorchEngine that shows logits."""

    shows_logits = True


def open_logits(bundle: Bundle, app: str | None, options: EngineOptions) -> LogitsEngine | None:
    """The engine of an app with logits; None for a program that was exported without them."""
    engine = LogitsEngine.of(bundle, app, options)
    if LOGITS in engine.outputs(PLAIN):
        return engine
    engine.close()
    return None
