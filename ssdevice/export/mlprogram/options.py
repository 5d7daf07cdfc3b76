"""Options of exports for Core ML, as a target or as ExecuTorch's delegate."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Self

from ssdevice.errors import ConfigError
from ssdevice.export.target import TargetOptions

if TYPE_CHECKING:
    from ssdevice.export.plan import ExportOptions


class KVWrite(StrEnum):
    """How new rows are written to the state: at an offset, or by a mask where offsets crash a
    compiler.
    """

    SLICE = "slice"
    MASK = "mask"


class ComputeUnits(StrEnum):
    """Which processors a host should let Core ML use."""

    ALL = "all"
    CPU_AND_GPU = "cpu_and_gpu"
    CPU_AND_NE = "cpu_and_ne"
    CPU_ONLY = "cpu_only"


class Deployment(StrEnum):
    """The oldest system that a package runs on; macOS 15 and 26 correspond to these."""

    IOS18 = "iOS18"
    IOS26 = "iOS26"

    @classmethod
    def _missing_(cls, value: object) -> Self:
        """The target that ``--deployment-target`` names; raises ConfigError for a system without
        states.
        """
        for target in cls:
            if str(value).strip().lower() in (target.lower(), MACOS[target].lower()):
                return target
        known = ", ".join(f"{target} ({MACOS[target]})" for target in cls)
        raise ConfigError(
            f"--deployment-target {value}: too old or unknown; a package keeps its KV cache in "
            f"states, which need {cls.IOS18}: choose one of {known}"
        )


MACOS = {Deployment.IOS18: "macOS15", Deployment.IOS26: "macOS26"}


@dataclass(frozen=True)
class CoreMLOptions(TargetOptions):
    """``per_channel``: int4 with one scale per channel instead of one per block.

    For the others see their types.

    The Neural Engine takes 4-bit weights only per channel, and may refuse writes at offsets.
    """

    owner: ClassVar[str] = "Core ML's"
    texts: ClassVar[Mapping[str, str]] = {
        "kv_write": (
            "how rows are written to the cache: at an offset, or by a mask where that fails"
        ),
        "per_channel": "int4 with a scale per channel, which the Neural Engine needs",
        "compute_units": "what hosts let Core ML use",
        "deployment_target": f"oldest system it runs on: {', '.join(Deployment)}",
    }

    kv_write: KVWrite = KVWrite.SLICE
    per_channel: bool = False
    compute_units: ComputeUnits = ComputeUnits.CPU_AND_GPU
    deployment_target: Deployment = Deployment.IOS18

    def check(self, options: "ExportOptions") -> None:
        """Raise ConfigError if they do not fit the other options of an export."""
        from ssdevice.bundle.manifest import Precision  # not needed for --help

        if self.per_channel and options.quant is not Precision.INT4:
            raise ConfigError(f"--per-channel is a variant of int4; {options.quant} has no blocks")
