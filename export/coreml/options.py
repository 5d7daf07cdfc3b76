"""What can be chosen for a Core ML export alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ssdevice.errors import ConfigError


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
class CoreMLOptions:
    """``kv_write``, ``compute_units``, ``deployment``: see there.

    ``per_channel``: int4 with one scale a channel, not one a block.

    The Neural Engine takes 4-bit weights per channel alone, and may refuse writes at offsets.
    """

    kv_write: KVWrite = KVWrite.SLICE
    per_channel: bool = False
    compute_units: ComputeUnits = ComputeUnits.CPU_AND_GPU
    deployment: Deployment = Deployment.IOS18
