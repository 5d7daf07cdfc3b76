"""What can be chosen for a Core ML export alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


@dataclass(frozen=True)
class CoreMLOptions:
    """``kv_write``, ``compute_units``: see there. ``per_channel``: int4 with one scale a channel, not one a block.

    The Neural Engine takes 4-bit weights per channel alone, and may refuse writes at offsets.
    """

    kv_write: KVWrite = KVWrite.SLICE
    per_channel: bool = False
    compute_units: ComputeUnits = ComputeUnits.CPU_AND_GPU
