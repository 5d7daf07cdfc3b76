"""The ONNX target on the runtime side."""

from functools import partial
from pathlib import Path

from ssdevice.bundle.folder import Bundle
from ssdevice.errors import BundleError
from ssdevice.runtime.engine import Engine, EngineOptions
from ssdevice.runtime.target import AppFile, RuntimeTarget


class OnnxTarget(RuntimeTarget):
    """Graphs on ONNX Runtime; the slots for apps are inputs."""

    name = "onnx"
    extra = ""  # ONNX Runtime comes with the package
    heeds = frozenset({"threads", "spinning", "profile", "kernels"})

    def open_engine(self, bundle: Bundle, app: str | None, options: EngineOptions) -> Engine:
        from ssdevice.runtime.onnx.engine import open_engine

        return open_engine(bundle, app, options)

    def build_kernels(self) -> Path | None:
        from ssdevice.runtime.onnx import kernels

        return kernels.build()

    def check_browser(self, bundle: Bundle) -> None:
        from ssdevice.bundle.manifest import CacheDtype, Precision

        if bundle.manifest.precision is Precision.INT4:
            raise BundleError(
                f"{bundle.folder} is INT4, for which browsers have no fast kernel; "
                "export with --quant int8"
            )
        dtype = bundle.manifest.cache_dtype
        if dtype not in (CacheDtype.FP32, CacheDtype.FP16):
            raise BundleError(
                f"{bundle.folder} has a cache of {dtype}; browsers need float32 or float16"
            )

    def app_file(self, bundle: Bundle, name: str, folder: Path) -> AppFile:
        from ssdevice.runtime.onnx.adapter import ADAPTER_FILE, write_adapter

        return ADAPTER_FILE, partial(write_adapter, base_sha256=bundle.manifest.model.sha256)


TARGET = OnnxTarget()
