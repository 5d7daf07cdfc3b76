"""The streams in an app's adapter folder: ``streams.safetensors`` and ``streams.json``, beside
PEFT's files.
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


def write_streams(folder: Path, streams: Streams, settings: AdapterSettings) -> None:
    """Write ``streams.json`` and ``streams.safetensors``: factors in float16, as a LoRA's are,
    others in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, value in streams.state_dict().items():
        kind = (
            torch.float16
            if name.startswith(("adapters.", "token.", "follow.", "own."))
            else torch.float32
        )
        weights[name] = (
            (value.detach().to(kind) if value.is_floating_point() else value).cpu().contiguous()
        )
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
    own = streams.state_dict()
    expected = {
        name: tuple(value.shape)
        for name, value in own.items()
        if name.partition(".")[0] not in added
    }
    for name, shape in expected.items():
        if name not in weights:
            raise InputError(f"{file}: tensor {name!r} is missing")
        if tuple(weights[name].shape) != shape:
            raise InputError(
                f"{file}: tensor {name!r} has shape {list(weights[name].shape)}, expected {list(shape)}"
            )
    for name, value in weights.items():
        if name not in expected:
            raise InputError(f"{file}: unexpected tensor {name!r}")
        if own[name].is_floating_point():
            check_values(file, name, value)
    if streams.config.draft_vocabulary:
        ids = weights["draft_ids"]
        if ids.dtype != torch.int32:
            raise InputError(f"{file}: tensor 'draft_ids' is {ids.dtype}, expected int32")
        check_draft_ids(ids, streams.vocab, f"{file}: ")
    streams.load_state_dict(weights, strict=not added)


def check_values(file: Path, name: str, value: Tensor) -> None:
    """Raise InputError for values that are not finite, and for a tensor of integers or of floats of
    8 bits.
    """
    if value.dtype not in FLOATS:
        kind = str(value.dtype).removeprefix("torch.")
        what = f"tensor {name!r} is {kind}, as quantized weights are"
        raise InputError(f"{file}: {what}: save the adapter in float32, float16 or bfloat16")
    if not torch.isfinite(value).all():
        raise InputError(f"{file}: tensor {name!r} has values that are not finite")
