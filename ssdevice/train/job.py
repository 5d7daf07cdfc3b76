"""What every stage of a run is given: its device and precision, and its share among processes."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ssdevice.progress import Report
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.train.options import TrainOptions

T = TypeVar("T")
PATIENCE = timedelta(hours=12)
"""How long processes wait for each other.

One may still be generating answers when the others are done.
"""


BF16_OF_CPUS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16", "arm_bf16")
"""torch's names for what multiplies bfloat16 in a CPU."""


@dataclass(frozen=True)
class Place:
    """The device and precision of this process, and its ``rank`` among ``world`` processes.

    ``bf16``: whether products run in bfloat16. ``state``: accelerate's ``PartialState``.
    """

    device: torch.device
    rank: int
    world: int
    bf16: bool
    state: Any

    @classmethod
    def find(cls, precision: str) -> Self:
        """The accelerator of this process, or the CPU.

        ``accelerate launch`` and ``torchrun`` start several processes.
        """
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env

        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
        if several:
            # Without CUDA they must be told to use the CPU; a single one may have an Apple GPU.
            cpu = cpu or not torch.cuda.is_available()
            state = PartialState(cpu=cpu, timeout=PATIENCE)
        else:
            state = PartialState(cpu=cpu)
        bf16 = has_bf16(state.device) if precision == "auto" else precision == "bf16"
        return cls(
            device=state.device,
            rank=state.process_index,
            world=state.num_processes,
            bf16=bf16,
            state=state,
        )

    @property
    def main(self) -> bool:
        """Whether this process writes the files and reports."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of the items."""
        return list(items[self.rank :: self.world])

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.state.wait_for_everyone()

    def leave(self) -> None:
        """End the group of processes."""
        if self.world > 1:
            self.state.destroy_process_group()

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which products are bfloat16, if that is the precision."""
        if self.bf16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def parallel(self, module: nn.Module) -> nn.Module:
        """The module with its gradients averaged over the processes."""
        if self.world == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(
            module, device_ids=devices, broadcast_buffers=False
        )

    def total(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over the processes, in place."""
        if self.world > 1:
            torch.distributed.all_reduce(value)
        return value


def has_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16.

    Other CPUs emulate it, about 30 times slower than float32.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        found = torch.cpu.get_capabilities()
        return any(found.get(name) for name in BF16_OF_CPUS)
    return False


@dataclass(frozen=True)
class Job:
    """One process's part of a run.

    ``folder``: the base's; ``report``: silent in all processes but the first.
    """

    options: TrainOptions
    place: Place
    folder: Path
    tokenizer: ChatTokenizer
    report: Report
