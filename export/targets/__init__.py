"""One module a target; each offers ``EXPORTER``, which ``ssdevice.export.stages`` drives."""

from __future__ import annotations

import importlib
from typing import cast

from ssdevice.config import Target
from ssdevice.errors import MissingExtraError
from ssdevice.export.plan import Exporter

EXTRAS = {Target.ONNX: "export", Target.COREML: "coreml", Target.EXECUTORCH: "executorch"}


def exporter(target: Target) -> Exporter:
    """The exporter of a target; raises MissingExtraError naming the extra that installs what it needs."""
    try:
        module = importlib.import_module(f"ssdevice.export.targets.{target.value}")
    except ModuleNotFoundError as error:
        raise MissingExtraError(EXTRAS[target], error.name or target.value) from error
    return cast(Exporter, module.EXPORTER)
