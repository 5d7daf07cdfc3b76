"""The Core AI target on the export side."""

from typing import TYPE_CHECKING

from ssdevice.export.target import AsStored, ExportTarget

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.export.exporter import Exporter
    from ssdevice.export.plan import ExportOptions
    from ssdevice.model.step import StreamModel
    from ssdevice.runtime.engine import Engine, EngineOptions


class CoreAITarget(ExportTarget):
    """Assets for Apple's systems, which Apple's runtime also executes on Linux."""

    name = "coreai"
    extra = "coreai"

    def exporter(self, options: "ExportOptions") -> "Exporter":
        from ssdevice.export.coreai.exporter import CoreAIExporter

        return CoreAIExporter()

    def logits_engine(
        self, bundle: "Bundle", app: str | None, options: "EngineOptions"
    ) -> "Engine | None":
        from ssdevice.runtime.coreai.engine import CoreAIEngine

        engine = CoreAIEngine.of(bundle, app)
        engine.shows_logits = True
        return engine

    def as_stored(self, bundle: "Bundle", app: str | None, model: "StreamModel") -> AsStored:
        from ssdevice.bundle.manifest import Precision
        from ssdevice.export.coreai.weights import stored

        # Products are float32 in every precision, so with the stored weights only the order of sums
        # differs.
        return stored(model, bundle.manifest.precision, values=True), Precision.FP32


TARGET = CoreAITarget()
