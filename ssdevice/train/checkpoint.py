"""Checkpoints of a training run: written whole or not at all, so that a killed run goes on where it was."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssdevice.errors import InputError

FOLDER = ".training"


@dataclass(frozen=True)
class Checkpoint:
    """``step``: optimizer steps done. ``fingerprint``: the options that must not change between runs."""

    step: int
    fingerprint: str
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    history: list[list[float]]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write to a temporary file, then rename: a kill at any moment leaves the last checkpoint or the new one."""
    target = folder / FOLDER / "checkpoint.pt"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    torch.save(vars(checkpoint), temporary)
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(temporary, target)


def load(folder: Path, fingerprint: str) -> Checkpoint | None:
    """The checkpoint in ``folder``, if there is one; raises InputError if another run left it."""
    target = folder / FOLDER / "checkpoint.pt"
    if not target.is_file():
        return None
    found = Checkpoint(**torch.load(target, weights_only=True))
    if found.fingerprint != fingerprint:
        raise InputError(
            f"{folder} holds an unfinished run with other options or data; "
            f"repeat its command to finish it, or delete {target.parent} to begin anew"
        )
    return found


def remove(folder: Path) -> None:
    """Forget the checkpoint of a finished run."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
