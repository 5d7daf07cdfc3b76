"""Conversations on disk: the rows of the KV cache, their tokens, and the messages, for one bundle
and app.

A file is one of safetensors with a description in JSON, which is checked like one that came from
someone hostile.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice import arguments, strict_json
from ssdevice.adapters.storage import read_tensors, write_tensors
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.integrity import manifest_bytes
from ssdevice.bundle.staging import Stage, disk_errors
from ssdevice.config import load_strict
from ssdevice.contract import ROWS, CacheForm
from ssdevice.errors import InputError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import check_prompt
from ssdevice.text.messages import WAITING, Chat, checked

DESCRIPTION = "description"
HASH = "sha256"
MAX_DESCRIPTION = 1 << 24
DEPTH = 64


@dataclass(frozen=True)
class Saved:
    """What a file says of its rows: the ``bundle`` (sha256 of its manifest), the app, and the token
    of each row.
    """

    bundle: str
    app: str
    text: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    template: Mapping[str, Any]


def save(
    file: str | Path, bundle: Bundle, app: str, conversation: Conversation, chat: Chat
) -> None:
    """Write a conversation.

    Raises InputError for an empty one, a target without access to its cache, or a bad path.
    """
    file = arguments.path("a file", file)
    _check_target(bundle)
    if not conversation.length:
        raise InputError(
            "there is nothing to save: nothing has been computed since the conversation began"
        )
    if file.is_dir():
        raise InputError(f"{file} is a folder, expected a file name")
    rows = conversation.cache.rows(0, conversation.length)
    text = tuple(conversation.text[: conversation.length])
    assert rows is not None
    saved = Saved(_identity(bundle), app, text, chat.messages, chat.tools, chat.template)
    description = np.frombuffer(json.dumps(dataclasses.asdict(saved)).encode(), np.int8)
    with disk_errors(file), closing(Stage(file, folder=False)) as stage:
        write_tensors(
            stage.path, {DESCRIPTION: description, ROWS: rows, HASH: _digest(description, rows)}
        )
        stage.publish(replace=True)


def restore(file: str | Path, bundle: Bundle, app: str, conversation: Conversation) -> Chat:
    """Fill an empty conversation from a file, and return its messages.

    Raises InputError for another kind of file, a damaged one, or one of another bundle or app.
    """
    file = arguments.path("resume", file)
    _check_target(bundle)
    geometry = conversation.geometry
    shape = (2 * geometry.layers, geometry.context, geometry.row_width)
    dtype = np.dtype(bundle.manifest.cache_dtype)
    tensors = _tensors(file, int(np.prod(shape)) * dtype.itemsize + 2 * MAX_DESCRIPTION)
    description = tensors[DESCRIPTION]
    rows = tensors[ROWS]
    if tensors[HASH].tobytes() != _digest(description, rows).tobytes():
        raise InputError(f"{file} is damaged: its content has another sha256")
    raw = strict_json.parse(description.tobytes(), f"{file}: {DESCRIPTION}", InputError, DEPTH)
    saved = load_strict(Saved, raw, str(file))
    if saved.bundle != _identity(bundle):
        raise InputError(
            f"{file}: saved with another bundle than {bundle.folder}; compute it again"
        )
    if saved.app != app:
        raise InputError(f"{file}: saved with app {saved.app[:60]!r}, this session uses {app!r}")
    check_prompt(geometry, saved.text, 0)
    expected = (shape[0], len(saved.text), shape[2])
    if rows.shape != expected or rows.dtype != dtype:
        raise InputError(
            f"{file}: rows are {rows.dtype} {list(rows.shape)}, expected {dtype} {list(expected)}"
        )
    if not np.isfinite(rows).all():
        raise InputError(f"{file}: rows have values that are not finite")
    chat = Chat(checked(saved.messages, WAITING)).given(saved.tools, saved.template)
    conversation.cache.commit({ROWS: rows}, 0, len(saved.text))
    conversation.text = list(saved.text)
    conversation.length = len(saved.text)
    return chat


def _tensors(file: Path, most: int) -> dict[str, NDArray[Any]]:
    """The three tensors of a file of at most so many bytes."""
    if not file.is_file():  # opening a pipe would block
        raise InputError(f"{file}: no such file")
    if file.stat().st_size > most:
        raise InputError(
            f"{file} has {file.stat().st_size} bytes, a conversation of this bundle has at most "
            f"{most}"
        )
    tensors = read_tensors(file)
    if tensors.keys() != {DESCRIPTION, ROWS, HASH} or tensors[DESCRIPTION].nbytes > MAX_DESCRIPTION:
        raise InputError(f"{file}: not a saved conversation")
    return tensors


def _digest(description: NDArray[Any], rows: NDArray[Any]) -> NDArray[np.int8]:
    digest = hashlib.sha256(description.tobytes())
    digest.update(np.ascontiguousarray(rows).data)
    return np.frombuffer(digest.digest(), np.int8)


def _identity(bundle: Bundle) -> str:
    return hashlib.sha256(manifest_bytes(bundle.folder)).hexdigest()


def _check_target(bundle: Bundle) -> None:
    if bundle.manifest.cache is not CacheForm.EXTERNAL:
        raise InputError(
            f"{bundle.folder}: {bundle.manifest.target} keeps the KV cache inside its graphs; only "
            "conversations of bundles with an external cache (ONNX) can be saved and resumed"
        )
