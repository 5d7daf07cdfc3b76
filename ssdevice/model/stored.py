"""What the files of a Hugging Face base hold, as their headers and JSON say: no weight is read for
it.
"""

import math
import re
from collections.abc import Iterable, Mapping
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
"""Where converters say in which way they quantized: objects in ``config.json``, or files beside it."""
_METHODS = ("quant_method", "quant_algo", "bits", "w_bit")
_WANTED = "ssdevice quantizes itself (--quant) and needs the unquantized model"

# Tensors that a decoder of text never reads. Everything else that the model does not read was meant
# to change its numbers: scales, biases, adapters, layers.
_HARMLESS = {
    r"rotary_emb\.|(^|\.)(position_ids|masked_bias|version)$": "computed buffers",
    r"(^|\.)mtp(\.|_)": "layers that predict further tokens",
    r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.": "parts for images or sound",
    r"(^|\.)(v_head|value_head)\.": "a value head",
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; ``dtype`` as safetensors names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's weights by name.

    Raises InputError for damaged files and types of no float.
    """
    found: dict[str, Stored] = {}
    for file in weight_files(folder):
        try:
            with reading(file), safe_open(str(file), framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # no mapping
                    entry = tensors.get_slice(name)
                    found[name] = Stored(file, entry.get_dtype(), tuple(entry.get_shape()))
        except SafetensorError as error:
            what = f"{file} has {file.stat().st_size} bytes and is no whole safetensors file ({first_line(error)})"
            raise InputError(
                f"{what}: it was cut short or is something else; get it again"
            ) from error
    for name, tensor in found.items():
        if tensor.dtype not in FLOATS and _harmless(name) is None:
            raise InputError(
                f"{folder}: {name} is stored as {tensor.dtype}, as quantized weights are: {_WANTED}"
            )
    return found


def check_unquantized(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError, which names the method, for a folder whose ``config`` or files say that it
    is quantized.
    """
    parts = {CONFIG_FILE: config, f"text_config of {CONFIG_FILE}": config.get("text_config") or {}}
    told = [
        (f"{key} in {where}", part[key])
        for where, part in parts.items()
        for key in _KEYS
        if part.get(key)
    ]
    told += [(name, read_json(folder / name)) for name in _FILES if (folder / name).is_file()]
    for where, settings in told:
        raise InputError(
            f"{folder}: the weights are quantized by {_method(settings)} ({where}): {_WANTED}"
        )


def _method(settings: Any) -> str:
    """The name of a quantization in its settings."""
    settings = settings if isinstance(settings, Mapping) else {}
    settings = {**settings, **(settings.get("quantization") or {})}
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    if (known := next((key for key in _METHODS if settings.get(key)), None)) is None:
        return "an unnamed method"
    return (
        str(settings[known])[:40]
        if known.startswith("quant_")
        else f"an unnamed method to {settings[known]} bits"
    )


def unread_notes(folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each kind of tensors that the model does not read.

    Raises InputError unless they are harmless.
    """
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        kinds.setdefault(_harmless(name) or "", []).append(name)
    if unknown := kinds.get(""):
        what = f"the model does not read {unknown[0]} and {len(unknown) - 1} more tensors of the weights"
        why = "so it would compute something else than was trained"
        how = "if they are not needed, save the model without them (transformers' from_pretrained and save_pretrained)"
        raise InputError(f"{folder}: {what}, {why}; {how}")
    return tuple(
        f"not read from the weights: {what} ({found[0]} and {len(found) - 1} more tensors)"
        for what, found in kinds.items()
    )


def wrapper_note(missing: Iterable[str], found: Iterable[str]) -> str:
    """What to do about a wrapper (DataParallel, torch.compile) that put a prefix before names;
    empty without one.
    """
    wanted = tuple(f".{name}" for name in missing)
    name = min((name for name in found if name.endswith(wanted)), default=None)
    if name is None:
        return ""
    prefix = min((name.removesuffix(end[1:]) for end in wanted if name.endswith(end)), key=len)
    return f": {name} was saved from a wrapper, which put {prefix!r} before all names: save the model inside it"


def _harmless(name: str) -> str | None:
    return next((what for pattern, what in _HARMLESS.items() if re.search(pattern, name)), None)
