"""Weights in mapped files.

The system can take their memory back at any time, because it can read them again.
"""

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

LARGE = 1 << 20
"""A tensor of at least so many bytes is mapped from a file."""
_files: WeakSet[mmap.mmap] = WeakSet()


def mapped(values: Tensor, folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """``values`` in an unnamed file of ``folder``, which goes with the tensor.

    Small tensors stay in memory, and so do all if the disk refuses.
    """
    found = values.detach().to(dtype)
    if found.nbytes < LARGE or not hasattr(mmap.mmap, "madvise"):  # Windows
        return found
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            rest = found.contiguous().numpy().reshape(-1).view(np.uint8).data
            while rest:  # a single call writes 2 GB at most
                written = file.write(rest)
                rest = rest[written:]
            memory = mmap.mmap(file.fileno(), found.nbytes)
    except OSError:
        return found
    _files.add(memory)
    return torch.frombuffer(memory, dtype=dtype).view(found.shape)


def release() -> None:
    """Take all mapped weights out of this process's memory; they are read again when needed."""
    for memory in list(_files):
        memory.madvise(mmap.MADV_DONTNEED)


@contextmanager
def released_after(layers: Iterable[nn.Module]) -> Iterator[None]:
    """In this context mapped weights leave memory whenever one of these modules has run."""
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(lambda *_: release()))
        yield
