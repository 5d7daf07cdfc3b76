"""What can be chosen for an ExecuTorch export alone."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ssdevice.export.target import TargetOptions


class Delegate(StrEnum):
    """What runs a program's operators: XNNPACK on CPUs everywhere, or Core ML on Apple's systems."""

    XNNPACK = "xnnpack"
    COREML = "coreml"


@dataclass(frozen=True)
class ExecutorchOptions(TargetOptions):
    """``delegate``: see there."""

    owner: ClassVar[str] = "ExecuTorch's"
    flags: ClassVar[tuple[str, ...]] = ("--delegate",)

    delegate: Delegate = Delegate.XNNPACK

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--delegate",
            choices=[delegate.value for delegate in Delegate],
            default=cls.delegate.value,
            help="what runs an ExecuTorch program; coreml is Apple's alone (default xnnpack)",
        )

    @classmethod
    def parse(cls, args: Namespace) -> ExecutorchOptions:
        return cls(Delegate(args.delegate))
