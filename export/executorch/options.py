"""What can be chosen for an ExecuTorch export alone."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ssdevice.export.target import TargetOptions

GIVES_LOGITS = "step and step_plain also give their logits, for `ssdevice verify`"
"""A note of a bundle that was exported with ``logits``."""


class Delegate(StrEnum):
    """What runs a program's operators: XNNPACK on CPUs everywhere, or Core ML on Apple's systems."""

    XNNPACK = "xnnpack"
    COREML = "coreml"


@dataclass(frozen=True)
class ExecutorchOptions(TargetOptions):
    """``delegate``: see there. ``logits``: functions also give their logits, by which ``verify`` measures margins."""

    owner: ClassVar[str] = "ExecuTorch's"
    flags: ClassVar[tuple[str, ...]] = ("--delegate", "--logits")

    delegate: Delegate = Delegate.XNNPACK
    logits: bool = False

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--delegate",
            choices=[delegate.value for delegate in Delegate],
            default=cls.delegate.value,
            help="what runs an ExecuTorch program; coreml runs on Apple's systems only (default xnnpack)",
        )
        parser.add_argument(
            "--logits", action="store_true", help="the program shows `verify` its logits, for development"
        )

    @classmethod
    def parse(cls, args: Namespace) -> ExecutorchOptions:
        return cls(Delegate(args.delegate), args.logits)
