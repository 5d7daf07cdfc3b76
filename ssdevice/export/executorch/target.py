"""The ExecuTorch target on the export side, and the options that only its exports have."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from ssdevice.contract import LOGITS, PLAIN
from ssdevice.errors import ConfigError
from ssdevice.export.mlprogram.options import CoreMLOptions, KVWrite
from ssdevice.export.target import AsStored, ExportTarget, TargetOptions

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.export.exporter import Exporter
    from ssdevice.export.plan import ExportOptions
    from ssdevice.model.step import StreamModel
    from ssdevice.runtime.engine import Engine, EngineOptions


GIVES_LOGITS = "step and step_plain also return their logits, for `ssdevice verify`"
"""The note in a bundle that was exported with ``logits``."""


class Delegate(StrEnum):
    """The backend of a program's operators: XNNPACK on all CPUs, or Core ML on Apple's systems."""

    XNNPACK = "xnnpack"
    COREML = "coreml"


@dataclass(frozen=True)
class ExecutorchOptions(TargetOptions):
    """``delegate``: see Delegate.

    ``logits``: functions also return their logits, for the margins in ``verify``.
    """

    owner: ClassVar[str] = "ExecuTorch's"
    texts: ClassVar[Mapping[str, str]] = {
        "delegate": "the backend of a program; coreml runs only on Apple's systems",
        "logits": "the program shows `verify` its logits, for development",
    }

    delegate: Delegate = Delegate.XNNPACK
    logits: bool = False


class ExecutorchTarget(ExportTarget):
    """Programs whose operators run on XNNPACK or Core ML."""

    name = "executorch"
    extra = "executorch"
    options = (ExecutorchOptions, CoreMLOptions)

    def exporter(self, options: "ExportOptions") -> "Exporter":
        if options.chosen(ExecutorchOptions).delegate is Delegate.COREML:
            from ssdevice.export.executorch.coreml_exporter import CoreMLDelegateExporter

            return CoreMLDelegateExporter()
        from ssdevice.export.executorch.exporter import ExecutorchExporter

        return ExecutorchExporter()

    def check(self, options: "ExportOptions") -> None:
        super().check(options)
        coreml = options.chosen(CoreMLOptions)
        if options.chosen(ExecutorchOptions).delegate is Delegate.COREML:
            if coreml.kv_write is not KVWrite.SLICE:
                raise ConfigError(
                    "--kv-write belongs to the coreml target: ExecuTorch writes the cache of its "
                    "programs itself"
                )
        elif any(isinstance(one, CoreMLOptions) for one in options.target_options):
            raise coreml.refused(self.name)
        coreml.check(options)

    def form(self, chosen: Iterable[TargetOptions]) -> str:
        delegates = [one.delegate for one in chosen if isinstance(one, ExecutorchOptions)]
        return "-".join([self.name, *(one for one in delegates if one is not Delegate.XNNPACK)])

    def describe(self, options: "ExportOptions") -> dict[str, Any]:
        return {"delegate": options.chosen(ExecutorchOptions).delegate.value}

    def logits_engine(
        self, bundle: "Bundle", app: str | None, options: "EngineOptions"
    ) -> "Engine | None":
        from ssdevice.runtime.executorch.engine import ExecutorchEngine

        engine = ExecutorchEngine.of(bundle, app, options)
        if LOGITS in engine.outputs(PLAIN):
            return engine
        engine.close()  # exported without --logits
        return None

    def as_stored(self, bundle: "Bundle", app: str | None, model: "StreamModel") -> AsStored:
        from ssdevice.bundle.manifest import Precision
        from ssdevice.export.mlprogram.stored import stored_weights
        from ssdevice.runtime.executorch.coreml_delegate import open_delegates
        from ssdevice.runtime.executorch.engine import PROGRAM
        from ssdevice.runtime.executorch.file import has_coreml

        if not has_coreml(file := bundle.file(PROGRAM)):
            return super().as_stored(bundle, app, model)
        _, package = open_delegates(file)
        return stored_weights(model, package, tuple(bundle.functions)), Precision.FP16


TARGET = ExecutorchTarget()
