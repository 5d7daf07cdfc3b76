"""What can be chosen for an ExecuTorch export alone."""

from __future__ import annotations

from enum import StrEnum


class Delegate(StrEnum):
    """What runs a program's operators: XNNPACK on CPUs everywhere, or Core ML on Apple's systems."""

    XNNPACK = "xnnpack"
    COREML = "coreml"
