"""What the files of a Hugging Face base hold, by their headers and JSON, without their weights."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ssdevice.adapters.base_files import weight_files
from ssdevice.config import read_json
from ssdevice.errors import InputError, first_line, reading
from ssdevice.text.chat_template import CONFIG_FILE

FLOATS = ("F64", "F32", "F16", "BF16")
_KEYS = ("quantization_config", "quantization", "compression_config")
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where converters say how they quantized: objects in ``config.json``, or files beside it."""
_METHODS = ("quant_method", "quant_algo", "bits", "w_bit")
"""Keys of these objects that name the method."""

# Tensors that a decoder of text never reads. Everything else that the model does not read was meant
# to change its numbers: scales, biases, adapters, layers.
_BUFFERS = r"rotary_emb\.|(^|\.)(position_ids|masked_bias|version)$"
_FURTHER_TOKENS = r"(^|\.)mtp(\.|_)"
_SENSES = r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\."
_VALUE_HEAD = r"(^|\.)(v_head|value_head)\."
_HARMLESS = {
    _BUFFERS: "computed buffers",
    _FURTHER_TOKENS: "layers that predict further tokens",
    _SENSES: "parts for images or sound",
    _VALUE_HEAD: "a value head",
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; ``dtype`` as safetensors names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's weights by name.

    Raises InputError for a damaged file, and for a tensor that is not of floats.
    """
    found: dict[str, Stored] = {}
    for file in weight_files(folder):
        try:
            with reading(file), safe_open(str(file), framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # no mapping
                    entry = tensors.get_slice(name)
                    found[name] = Stored(file, entry.get_dtype(), tuple(entry.get_shape()))
        except SafetensorError as error:
            raise InputError(
                f"{file} has {file.stat().st_size} bytes and is no whole safetensors file "
                f"({first_line(error)}): it was cut short or is something else; get it again"
            ) from error
    for name, tensor in found.items():
        if tensor.dtype not in FLOATS and _harmless(name) is None:
            raise InputError(
                f"{folder}: {name} is stored as {tensor.dtype}, as quantized weights are: "
                "ssdevice quantizes itself (--quant) and needs the unquantized model"
            )
    return found


def check_unquantized(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError for a folder whose ``config`` or files say that it is quantized.

    The message names the method.
    """
    for where, settings in _quantizations(folder, config):
        raise InputError(
            f"{folder}: the weights are quantized by {_method(settings)} ({where}): "
            "ssdevice quantizes itself (--quant) and needs the unquantized model"
        )


def _quantizations(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings of quantizations in a folder, and where each stands."""
    parts = {CONFIG_FILE: config, f"text_config of {CONFIG_FILE}": config.get("text_config") or {}}
    for where, part in parts.items():
        for key in _KEYS:
            if part.get(key):
                yield f"{key} in {where}", part[key]
    for name in _FILES:
        if (folder / name).is_file():
            yield name, read_json(folder / name)


def _method(settings: Any) -> str:
    """The name of a quantization in its settings."""
    if not isinstance(settings, Mapping):
        return "an unnamed method"
    settings = {**settings, **(settings.get("quantization") or {})}
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    for key in _METHODS:
        value = settings.get(key)
        if value and key.startswith("quant_"):
            return str(value)[:40]
        if value:
            return f"an unnamed method to {value} bits"
    return "an unnamed method"


def unread_notes(folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each kind of tensors that the model does not read.

    Raises InputError unless they are harmless.
    """
    harmless = dict[str, list[str]]()
    unknown = list[str]()
    for name in sorted(names):
        kind = _harmless(name)
        if kind is None:
            unknown.append(name)
        else:
            harmless.setdefault(kind, []).append(name)
    if unknown:
        raise InputError(
            f"{folder}: the model does not read {unknown[0]} and {len(unknown) - 1} more tensors "
            "of the weights, so it would compute something else than was trained; if they are not "
            "needed, save the model without them (transformers' from_pretrained and "
            "save_pretrained)"
        )
    return tuple(
        f"not read from the weights: {kind} ({found[0]} and {len(found) - 1} more tensors)"
        for kind, found in harmless.items()
    )


def wrapper_note(missing: Iterable[str], found: Iterable[str]) -> str:
    """How to undo the prefix that a wrapper (DataParallel, torch.compile) put before all names.

    Empty if no name of ``found`` is one of ``missing`` behind a prefix.
    """
    endings = tuple(f".{name}" for name in missing)
    prefixed = [name for name in found if name.endswith(endings)]
    if not prefixed:
        return ""
    name = min(prefixed)
    longest = max((ending for ending in endings if name.endswith(ending)), key=len)
    prefix = name.removesuffix(longest[1:])
    return (
        f": {name} was saved from a wrapper, which put {prefix!r} before all names: "
        "save the model inside it"
    )


def _harmless(name: str) -> str | None:
    """What a tensor of this name is, if no decoder of text reads it; otherwise None."""
    for pattern, kind in _HARMLESS.items():
        if re.search(pattern, name):
            return kind
    return None
