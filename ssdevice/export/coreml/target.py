"""The Core ML target on the export side."""

import sys
from typing import TYPE_CHECKING

from ssdevice.export.mlprogram.options import CoreMLOptions
from ssdevice.export.target import AsStored, ExportTarget

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.export.exporter import Exporter
    from ssdevice.export.plan import ExportOptions
    from ssdevice.model.step import StreamModel
    from ssdevice.runtime.engine import Engine, EngineOptions


class CoreMLTarget(ExportTarget):
    """Packages for Apple's systems."""

    name = "coreml"
    extra = "coreml"
    options = (CoreMLOptions,)

    def exporter(self, options: "ExportOptions") -> "Exporter":
        from ssdevice.export.coreml.exporter import CoreMLExporter

        return CoreMLExporter()

    def check(self, options: "ExportOptions") -> None:
        super().check(options)
        options.chosen(CoreMLOptions).check(options)

    def logits_engine(
        self, bundle: "Bundle", app: str | None, options: "EngineOptions"
    ) -> "Engine | None":
        if sys.platform == "darwin":  # there Core ML runs the package and hides its logits
            return None
        from ssdevice.export.coreml.logits import ShownProgram
        from ssdevice.mil.reader import Package
        from ssdevice.runtime.coreml.engine import MODEL, CoreMLEngine

        names = bundle.function_names(app)
        return CoreMLEngine(
            ShownProgram(Package.open(bundle.file(MODEL)), names), bundle.geometry, names
        )

    def as_stored(self, bundle: "Bundle", app: str | None, model: "StreamModel") -> AsStored:
        from ssdevice.bundle.manifest import Precision
        from ssdevice.export.mlprogram.stored import stored_weights
        from ssdevice.mil.program import Program
        from ssdevice.mil.reader import Package
        from ssdevice.runtime.coreml.engine import MODEL

        # With the package's own weights, only the rounding of activations to float16 remains.
        package = Program(Package.open(bundle.file(MODEL)))
        return stored_weights(
            model, package, tuple(bundle.function_names(app).values())
        ), Precision.FP16


TARGET = CoreMLTarget()
