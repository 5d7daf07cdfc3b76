"""Loads a Hugging Face base, an app's adapter and its streams from their folders."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ssdevice.adapters.settings import PEFT_CONFIG, PEFT_WEIGHTS, AdapterFolder, AdapterSettings, BaseIdentity
from ssdevice.config import StreamConfig, read_json
from ssdevice.errors import InputError, UnsupportedModelError, first_line, is_out_of_memory
from ssdevice.model.adapter import load_streams
from ssdevice.model.backbone import Backbone
from ssdevice.model.families import family_of
from ssdevice.model.lora import attach_lora, merge_lora
from ssdevice.model.mapped import mapped, release
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import Streams


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for training or export. ``settings``: None without streams."""

    identity: BaseIdentity
    model: StreamModel
    settings: AdapterSettings | None


def resolve_folder(model: str) -> Path:
    """A local Hugging Face folder, or the snapshot folder of a hub id; raises InputError."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise InputError(f"--model {model}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"--model {model}: no such folder, and the hub does not provide it ({first_line(error)})"
        ) from error


def read_config(folder: Path) -> Any:
    """The Hugging Face config in a folder, of a supported family; raises InputError or UnsupportedModelError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if (folder / PEFT_CONFIG).is_file():
        raise InputError(
            f"{folder}: has an adapter beside the model ({PEFT_CONFIG}), which AutoModel would apply: move it and "
            f"{PEFT_WEIGHTS} to a folder of their own and name that with --adapter, or remove them"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder}: no config.json; expected a Hugging Face model folder")
    raw = read_json(file)
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise UnsupportedModelError(f"{file}: has no model_type")
    family_of(raw["model_type"])
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise InputError(f"{file}: {' '.join(str(error).split())}") from error


def stored_parameters(folder: Path) -> dict[str, int]:
    """Elements of every tensor in a folder's safetensors files, from their headers; raises InputError."""
    sizes: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="np") as tensors:
                sizes |= {name: math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror or error})") from error
        except SafetensorError as error:
            raise InputError(
                f"{file} has {file.stat().st_size} bytes and is no whole safetensors file ({first_line(error)}): "
                "it was cut short or is something else; get it again"
            ) from error
    if not sizes:
        raise InputError(f"{folder}: no .safetensors weights")
    return sizes


LAYER = re.compile(r"model\.layers\.(\d+)\.")


def load_hf(folder: Path, dtype: torch.dtype = torch.float32, scratch: Path | None = None) -> Any:
    """The ``*ForCausalLM`` in a folder, in eval mode; raises InputError or UnsupportedModelError.

    ``scratch``: a folder for large weights in float32, in which they are mapped instead of held in memory. The library
    would fill what the files lack, or have in other shapes, with random numbers: such a folder is refused.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    config = read_config(folder)
    stored_parameters(folder)
    wanted: Any = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        loaded: Any
        if scratch is not None and (files := _weight_files(folder)):
            weights = {name: mapped(values, scratch) for name, values in _tensors(files)}
            kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            loaded = kind.from_pretrained(None, config=config, state_dict=weights, **wanted)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(folder, config=config, local_files_only=True, **wanted)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"{folder}: the model cannot be loaded ({first_line(error)})") from error
    hf, found = loaded
    for name, stored, asked in sorted(found["mismatched_keys"]):
        raise InputError(f"{folder}: {name} is {list(stored)} in the weights and {list(asked)} by config.json")
    if found["missing_keys"]:
        names = sorted(found["missing_keys"])
        raise InputError(f"{folder}: the weights lack {names[0]} and {len(names) - 1} more that config.json asks for")
    for name in sorted(found["unexpected_keys"]):
        layer = LAYER.match(name)
        if layer and int(layer[1]) >= config.num_hidden_layers:
            raise InputError(f"{folder}: the weights have {name}, config.json only {config.num_hidden_layers} layers")
    return hf.eval()


def _weight_files(folder: Path) -> list[Path]:
    """The files from which the library would load the model; none if it would not find any."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    index, whole = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if whole.is_file():
        return [whole]
    return sorted({folder / name for name in read_json(index)["weight_map"].values()}) if index.is_file() else []


def _tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files and its name; only one at a time is in memory."""
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            names = list(tensors.keys())
        for name in names:
            with safe_open(str(file), framework="pt") as tensors:  # its pages stay in memory until it is closed
                yield name, tensors.get_tensor(name)


def adopt(hf: Any, calibrated: Mapping[str, Tensor]) -> Any:
    """The model with copies of other values, by name, for some of its weights."""
    for name, values in calibrated.items():
        hf.get_parameter(name).data.copy_(values)
        release()
    return hf


def build(hf: Any, config: StreamConfig | None, context: int, gamma: int | None = None) -> StreamModel:
    """A StreamModel of a loaded base with fresh streams (``config`` None: without any; the host may draft ``gamma``).

    ``context``: tokens that a conversation may hold; position tables are longer, by POSITION_MARGIN.
    """
    backbone = Backbone(hf, context, context + POSITION_MARGIN)
    if config is None:
        return StreamModel(backbone, None, gamma or 0)
    return StreamModel(backbone, Streams(backbone, config), gamma or config.gamma)


POSITION_MARGIN = 1024
"""Rows of the position tables beyond the context: the largest prefill chunk or tree depth, plus streams."""


def load(
    folder: Path,
    adapter: Path | None,
    context: int,
    gamma: int | None = None,
    merge: bool = True,
    calibrated: Mapping[str, Tensor] | None = None,
    scratch: Path | None = None,
) -> LoadedModel:
    """The base in ``folder`` with the app in ``adapter``; ``gamma``: how many of its streams to keep.

    ``merge``: merge its LoRA into the base's weights; otherwise it stays separate, as ``LoraLinear``.
    An adapter without ``streams.json`` is a plain PEFT LoRA without streams. ``calibrated``: see ``adopt``;
    ``scratch``: see ``load_hf``. Raises InputError.
    """
    hf = adopt(load_hf(folder, scratch=scratch), calibrated or {})
    identity = BaseIdentity.of(folder, hf.config)
    opened = AdapterFolder.open(adapter, identity) if adapter is not None else None
    settings = opened.settings if opened is not None else None
    if opened is not None and opened.has_lora:
        hf = merge_lora(hf, opened.folder) if merge else attach_lora(hf, opened.folder)
    config = settings.streams if settings is not None else None
    if config is not None and gamma is not None and gamma > config.gamma:
        raise UnsupportedModelError(f"the tree needs {gamma} streams, the adapter was trained with {config.gamma}")
    model = build(hf, config, context, gamma)
    if model.streams is not None and adapter is not None:
        load_streams(adapter, model.streams)
        model.take_draft_rows()
    release()
    return LoadedModel(identity, model.eval(), settings)
