"""Where exporters are found: ``ssdevice.export.TARGET.exporter`` offers ``EXPORTER``, driven by ``export.stages``."""

from __future__ import annotations

import importlib
from typing import cast

from ssdevice.config import Target
from ssdevice.errors import MissingExtraError
from ssdevice.export.executorch.options import Delegate
from ssdevice.export.plan import Exporter

EXTRAS = {Target.ONNX: "export", Target.COREML: "coreml", Target.EXECUTORCH: "executorch"}


def exporter(target: Target, delegate: Delegate = Delegate.XNNPACK) -> Exporter:
    """The exporter of a target; raises MissingExtraError naming the extra that installs what it needs."""
    name = "exporter" if delegate is Delegate.XNNPACK else f"{delegate.value}_exporter"
    try:
        module = importlib.import_module(f"ssdevice.export.{target.value}.{name}")
    except ModuleNotFoundError as error:
        raise MissingExtraError(EXTRAS[target], error.name or target.value) from error
    return cast(Exporter, module.EXPORTER)
