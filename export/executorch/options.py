"""Options that only ExecuTorch exports have."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
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
    flags: ClassVar[tuple[str, ...]] = ("--delegate", "--logits")

    delegate: Delegate = Delegate.XNNPACK
    logits: bool = False

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--delegate",
            choices=[delegate.value for delegate in Delegate],
            help="the backend of an ExecuTorch program (default xnnpack); coreml runs only on Apple's systems",
        )
        parser.add_argument(
            "--logits", action="store_true", help="the program shows `verify` its logits, for development"
        )

    @classmethod
    def parse(cls, args: Namespace) -> ExecutorchOptions:
        return cls(Delegate(args.delegate or cls.delegate), args.logits)
