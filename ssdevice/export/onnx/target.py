"""The ONNX target on the export side."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ssdevice.contract import STEP
from ssdevice.export.target import AsStored, ExportTarget

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.export.exporter import Exporter
    from ssdevice.export.plan import ExportOptions
    from ssdevice.model.step import StreamModel
    from ssdevice.runtime.engine import Engine, EngineOptions


class OnnxTarget(ExportTarget):
    """Graphs for ONNX Runtime."""

    name = "onnx"
    extra = "export"

    def exporter(self, options: "ExportOptions") -> "Exporter":
        from ssdevice.export.onnx.exporter import OnnxExporter

        return OnnxExporter()

    def logits_engine(
        self, bundle: "Bundle", app: str | None, options: "EngineOptions"
    ) -> "Engine | None":
        try:
            from ssdevice.export.onnx.graphs import LogitsEngine
        except ModuleNotFoundError:
            return None  # without onnx margins are not measured, and a difference is a fault
        return LogitsEngine.of(bundle, app, options)

    def as_stored(self, bundle: "Bundle", app: str | None, model: "StreamModel") -> AsStored:
        from ssdevice.bundle.manifest import AdapterKind, Precision

        precision = bundle.manifest.precision
        if precision not in (Precision.INT8, Precision.INT4) or bundle.manifest.calibrated_rows:
            return super().as_stored(bundle, app, model)
        from ssdevice.export.calibration.smoothing import NOTE, smooth, texts
        from ssdevice.export.onnx.quantization import simulated
        from ssdevice.runtime.opened import tokenizer_of

        if NOTE in bundle.manifest.notes:
            smooth(model, texts(tokenizer_of(bundle)))
        cache_dtype = bundle.manifest.cache_dtype
        return simulated(
            model, precision, bundle.app(app).kind is AdapterKind.SLOT, cache_dtype=cache_dtype
        ), precision

    def parts(self, engine: "Engine") -> Mapping[str, str]:
        from ssdevice.runtime.onnx.engine import OnnxEngine

        try:
            from ssdevice.export.onnx.graphs import parts_of
        except ModuleNotFoundError:
            return {}
        assert isinstance(engine, OnnxEngine)
        return parts_of(engine.files[STEP])


TARGET = OnnxTarget()
