"""Options that only ExecuTorch exports have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ssdevice.export.target import TargetOptions

GIVES_LOGITS = "step and step_plain also return their logits, for `ssdevice verify`"
"""The note in a bundle that was exported with ``logits``."""


class Delegate(StrEnum):
    """The backend of a program's operators: XNNPACK on all CPUs, or Core ML on Apple's systems."""

    XNNPACK = "xnnpack"
    COREML = "coreml"


@dataclass(frozen=True)
class ExecutorchOptions(TargetOptions):
    """``delegate``: see Delegate. ``logits``: functions also return their logits, for the margins in ``verify``."""

    owner: ClassVar[str] = "ExecuTorch's"
    texts: ClassVar[Mapping[str, str]] = {
        "delegate": "the backend of a program; coreml runs only on Apple's systems",
        "logits": "the program shows `verify` its logits, for development",
    }

    delegate: Delegate = Delegate.XNNPACK
    logits: bool = False
