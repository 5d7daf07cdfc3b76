"""The Core AI target on the runtime side."""

from ssdevice.bundle.folder import Bundle
from ssdevice.runtime.engine import Engine, EngineOptions
from ssdevice.runtime.target import RuntimeTarget


class CoreAITarget(RuntimeTarget):
    """One asset, run by Apple's runtime on macOS and Linux."""

    name = "coreai"
    extra = "coreai"

    def open_engine(self, bundle: Bundle, app: str | None, options: EngineOptions) -> Engine:
        from ssdevice.runtime.coreai.engine import CoreAIEngine

        return CoreAIEngine.of(bundle, app)


TARGET = CoreAITarget()
