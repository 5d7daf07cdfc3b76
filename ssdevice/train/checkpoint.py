"""Checkpoints of a training run, written whole or not at all, so that a killed run can continue.

A checkpoint begins with the sha256 of the rest: no run continues from weights that a disk has
changed.
"""

import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from ssdevice.bundle.staging import Stage, lock_path
from ssdevice.errors import InputError
from ssdevice.train.options import UNFINISHED

State = dict[str, Any]
"""``step``: steps done; ``weights``, ``optimizer``, ``scheduler``: states; ``history``: losses."""


def save(folder: Path, state: State) -> None:
    """Write a checkpoint: a kill or a full disk leaves the old one or the new one."""
    content = io.BytesIO()  # torch's own writer does not say why it fails
    torch.save(state, content)
    with closing(Stage(folder / UNFINISHED / "checkpoint.pt", folder=False)) as stage:
        stage.path.write_bytes(hashlib.sha256(content.getbuffer()).digest() + content.getbuffer())
        stage.publish(replace=True)


@contextmanager
def claimed(folder: Path, fingerprint: str) -> Iterator[None]:
    """Only this run may use ``folder`` in this context.

    If the context fails before the run wrote anything, its mark is removed, so that its command can
    be corrected. Raises InputError if another run is unfinished or at work there.
    """
    file = folder / UNFINISHED / "run"
    if file.is_file() and file.read_bytes() != fingerprint.encode():
        raise InputError(
            f"{folder} holds an unfinished run with other options or data; "
            f"repeat its command to finish it, or delete {file.parent} to start over"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(fingerprint, "utf-8")
    try:
        lock = lock_path(file, wait=False)
    except BlockingIOError:
        raise InputError(
            f"another process is training {folder}; wait for it, or choose another --out"
        ) from None
    try:
        yield
    except BaseException:
        written = [each.name for each in file.parent.iterdir()]
        if written == [file.name]:
            shutil.rmtree(file.parent)
            if not any(folder.iterdir()):
                folder.rmdir()
        raise
    finally:
        os.close(lock)


def load(folder: Path) -> State | None:
    """The checkpoint in ``folder``, if there is one.

    Raises InputError if it is not as it was written.
    """
    target = folder / UNFINISHED / "checkpoint.pt"
    if not target.is_file():
        return None
    content = target.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(content[size:]).digest() != content[:size]:
        raise InputError(f"{target} is damaged; delete {target.parent} to start over")
    state: State = torch.load(io.BytesIO(content[size:]), weights_only=True)
    return state
