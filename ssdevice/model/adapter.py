"""The streams in an app's adapter folder: ``streams.safetensors`` and ``streams.json``.

They lie beside PEFT's files.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssdevice.adapters.settings import SETTINGS, WEIGHTS, AdapterSettings
from ssdevice.config import to_json
from ssdevice.errors import InputError, check_no_pointer
from ssdevice.model.streams import Streams, check_draft_ids

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
IN_HALF = ("adapters.", "token.", "follow.", "own.")
"""How the names of tensors begin that are stored in float16, as a LoRA's factors are."""


def write_streams(folder: Path, streams: Streams, settings: AdapterSettings) -> None:
    """Write ``streams.json`` and ``streams.safetensors``.

    Tensors are stored in float32, those that IN_HALF names in float16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, value in streams.state_dict().items():
        stored = value
        if value.is_floating_point():
            stored = value.detach().to(torch.float16 if name.startswith(IN_HALF) else torch.float32)
        weights[name] = stored.cpu().contiguous()
    save_file(weights, str(folder / WEIGHTS))
    text = json.dumps(to_json(settings), indent=2, ensure_ascii=False)
    (folder / SETTINGS).write_text(text + "\n", encoding="utf-8")


def load_streams(folder: Path, streams: Streams, added: tuple[str, ...] = ()) -> None:
    """Load trained weights into ``streams``.

    ``added``: terms that the folder's streams do not have; they stay as they are. Raises InputError
    for missing, unknown or non-finite tensors.
    """
    file = folder / WEIGHTS
    if not file.is_file():  # opening a pipe would block
        raise InputError(f"{file}: no such file")
    try:
        check_no_pointer(file)
        weights = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: cannot be read as safetensors ({error})") from error
    expected = {
        name: value
        for name, value in streams.state_dict().items()
        if name.partition(".")[0] not in added
    }
    _check_tensors(file, weights, expected)
    if streams.config.draft_vocabulary:
        ids = weights["draft_ids"]
        if ids.dtype != torch.int32:
            raise InputError(f"{file}: tensor 'draft_ids' is {ids.dtype}, expected int32")
        check_draft_ids(ids, streams.vocab, f"{file}: ")
    streams.load_state_dict(weights, strict=not added)


def _check_tensors(file: Path, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise InputError unless a file's tensors have the names and shapes of ``expected``."""
    for name, own in expected.items():
        if name not in weights:
            raise InputError(f"{file}: tensor {name!r} is missing")
        shape = list(weights[name].shape)
        if shape != list(own.shape):
            raise InputError(
                f"{file}: tensor {name!r} has shape {shape}, expected {list(own.shape)}"
            )
    for name, value in weights.items():
        if name not in expected:
            raise InputError(f"{file}: unexpected tensor {name!r}")
        if expected[name].is_floating_point():
            check_values(file, name, value)


def check_values(file: Path, name: str, value: Tensor) -> None:
    """Raise InputError for a tensor of integers or of 8-bit floats, or with values not finite."""
    if value.dtype not in FLOATS:
        kind = str(value.dtype).removeprefix("torch.")
        raise InputError(
            f"{file}: tensor {name!r} is {kind}, as quantized weights are: "
            "save the adapter in float32, float16 or bfloat16"
        )
    if not torch.isfinite(value).all():
        raise InputError(f"{file}: tensor {name!r} has values that are not finite")
