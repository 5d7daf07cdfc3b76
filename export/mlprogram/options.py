"""What can be chosen where Core ML runs what is exported: as a target, or as ExecuTorch's delegate."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from ssdevice.errors import ConfigError
from ssdevice.export.target import TargetOptions

if TYPE_CHECKING:
    from ssdevice.export.plan import ExportOptions


class KVWrite(StrEnum):
    """How new rows enter the state: written at an offset, or chosen row by row where offsets crash a compiler."""

    SLICE = "slice"
    MASK = "mask"


class ComputeUnits(StrEnum):
    """Which processors a host should let Core ML use."""

    ALL = "all"
    CPU_AND_GPU = "cpu_and_gpu"
    CPU_AND_NE = "cpu_and_ne"
    CPU_ONLY = "cpu_only"


class Deployment(StrEnum):
    """The oldest system a package runs on; macOS 15 and 26 are of the same age as these."""

    IOS18 = "iOS18"
    IOS26 = "iOS26"

    @classmethod
    def parse(cls, text: str) -> Deployment:
        """The target that ``--deployment-target`` names; raises ConfigError for a system without states."""
        wanted = text.strip().lower()
        for target in cls:
            if wanted in (target.lower(), SAME_AGE[target].lower()):
                return target
        known = ", ".join(f"{target} ({SAME_AGE[target]})" for target in cls)
        raise ConfigError(
            f"--deployment-target {text}: too old or unknown; a package holds its KV cache as states, which begin "
            f"with {cls.IOS18}: choose one of {known}"
        )


SAME_AGE = {Deployment.IOS18: "macOS15", Deployment.IOS26: "macOS26"}


@dataclass(frozen=True)
class CoreMLOptions(TargetOptions):
    """``kv_write``, ``compute_units``, ``deployment``: see there.

    ``per_channel``: int4 with one scale a channel, not one a block.

    The Neural Engine takes 4-bit weights per channel alone, and may refuse writes at offsets.
    """

    owner: ClassVar[str] = "Core ML's"
    flags: ClassVar[tuple[str, ...]] = ("--kv-write", "--per-channel", "--compute-units", "--deployment-target")

    kv_write: KVWrite = KVWrite.SLICE
    per_channel: bool = False
    compute_units: ComputeUnits = ComputeUnits.CPU_AND_GPU
    deployment: Deployment = Deployment.IOS18

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("Core ML alone, as a target or as a delegate")
        group.add_argument(
            "--kv-write",
            choices=[write.value for write in KVWrite],
            default=cls.kv_write.value,
            help="how rows enter the cache: slice at an offset, or mask, which asks less of compilers (default slice)",
        )
        group.add_argument(
            "--per-channel", action="store_true", help="int4 with a scale per channel, which the Neural Engine asks for"
        )
        group.add_argument(
            "--compute-units",
            choices=[units.value for units in ComputeUnits],
            default=cls.compute_units.value,
            help=f"what hosts let Core ML use (default {cls.compute_units.value})",
        )
        group.add_argument(
            "--deployment-target",
            default=cls.deployment.value,
            metavar="SYSTEM",
            help=f"oldest system it runs on: {', '.join(Deployment)} (default {cls.deployment.value})",
        )

    @classmethod
    def parse(cls, args: Namespace) -> CoreMLOptions:
        return cls(
            KVWrite(args.kv_write),
            args.per_channel,
            ComputeUnits(args.compute_units),
            Deployment.parse(args.deployment_target),
        )

    def check(self, options: ExportOptions) -> None:
        """Raise ConfigError where they do not fit the rest of an export's options."""
        from ssdevice.bundle.manifest import Precision  # --help is answered without it

        if self.per_channel and options.quant is not Precision.INT4:
            raise ConfigError(f"--per-channel is a form of int4; {options.quant} has no blocks to leave out")
