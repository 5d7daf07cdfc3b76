"""The ExecuTorch target on the runtime side."""

from pathlib import Path
from typing import Any

from ssdevice.bundle.folder import Bundle
from ssdevice.runtime.engine import Engine, EngineOptions
from ssdevice.runtime.target import AppFile, RuntimeTarget

PACKAGE = "package"


class ExecutorchTarget(RuntimeTarget):
    """One program; the slots for apps are part of its state."""

    name = "executorch"
    extra = "executorch"
    heeds = frozenset({"threads"})

    def open_engine(self, bundle: Bundle, app: str | None, options: EngineOptions) -> Engine:
        from ssdevice.runtime.executorch.engine import ExecutorchEngine

        return ExecutorchEngine.of(bundle, app, options)

    def app_file(self, bundle: Bundle, name: str, folder: Path) -> AppFile:
        from ssdevice.adapters.storage import write_tensors
        from ssdevice.runtime.executorch.engine import ADAPTER_FILE

        return ADAPTER_FILE, write_tensors

    def describe(self, bundle: Bundle) -> dict[str, Any]:
        from ssdevice.mil.audit import audit
        from ssdevice.runtime.executorch.coreml_delegate import open_delegates
        from ssdevice.runtime.executorch.engine import PROGRAM
        from ssdevice.runtime.executorch.file import has_coreml

        file = bundle.file(PROGRAM)
        if not has_coreml(file):
            return {}
        _, interpreter = open_delegates(file)
        return {PACKAGE: audit(interpreter.package)}


TARGET = ExecutorchTarget()
