"""Loads a Hugging Face base, an app's adapter and its streams from their folders."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ssdevice.adapters.base_files import INDEX, WHOLE, shards
from ssdevice.adapters.settings import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    Adapter,
    AdapterFolder,
    AdapterSettings,
    BaseIdentity,
)
from ssdevice.config import StreamConfig
from ssdevice.contract import Geometry
from ssdevice.errors import (
    REFUSALS,
    InputError,
    UnsupportedModelError,
    first_line,
    is_out_of_memory,
)
from ssdevice.model.adapter import load_streams
from ssdevice.model.backbone import Backbone
from ssdevice.model.families import family_of
from ssdevice.model.lora import attach_lora, merge_lora
from ssdevice.model.mapped import mapped, release
from ssdevice.model.step import StreamModel
from ssdevice.model.stored import (
    Stored,
    check_unquantized,
    stored_tensors,
    unread_notes,
    wrapper_note,
)
from ssdevice.model.streams import Streams
from ssdevice.rules import check_rule
from ssdevice.text.chat_template import read_object


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
        folder = Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "tokenizer*"]))
        # Only these weights: a repository may hold them in other forms too.
        weights = [WHOLE]
        index = folder / INDEX
        if index.is_file():
            weights += shards(index)
        return Path(snapshot_download(model, allow_patterns=weights))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"--model {model}: no such folder, and the hub does not provide it "
            f"({first_line(error)})"
        ) from error


SIZES = {
    "num_hidden_layers": "layers",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "hidden_size": "hidden",
    "vocab_size": "vocab",
}
"""Sizes in a config, and their names in a Geometry, whose bounds hold for them.

They are checked because transformers makes all layers that are asked for, with weights or not.
"""


def read_config(folder: Path) -> Any:
    """The Hugging Face config in a folder, of a supported family; raises InputError or
    UnsupportedModelError.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if (folder / PEFT_CONFIG).is_file():
        raise InputError(
            f"{folder}: has an adapter beside the model ({PEFT_CONFIG}), which AutoModel would "
            f"apply: move it and {PEFT_WEIGHTS} to a folder of their own and name that with "
            "--adapter, or remove them"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder}: no config.json; expected a Hugging Face model folder")
    raw = read_object(file)
    if not isinstance(raw.get("model_type"), str):
        raise UnsupportedModelError(f"{file}: has no model_type")
    family_of(raw["model_type"], raw)
    for key, value in raw.items():
        if key.endswith("_config") and value is not None and not isinstance(value, dict):
            raise InputError(f"{file}: {key[:60]!r} is not an object")
    check_unquantized(folder, raw)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (*REFUSALS, StrictDataclassError) as error:
        raise InputError(f"{file}: transformers cannot read it ({first_line(error)})") from error
    rules = {field.name: field.metadata for field in fields(Geometry)}
    for name, size in SIZES.items():
        check_rule(f"{file}: {name}", getattr(config, name, None), rules[size])
    return config


LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Base:
    """A ``*ForCausalLM`` in eval mode, and what its folder holds.

    ``parameters``: elements of the tensors that it reads, by stored name. ``notes``: a sentence for
    each kind of stored tensors that it does not read.
    """

    hf: Any
    parameters: Mapping[str, int]
    notes: tuple[str, ...]


def load_hf(folder: Path, dtype: torch.dtype = torch.float32, scratch: Path | None = None) -> Any:
    """The ``*ForCausalLM`` in a folder, in eval mode; arguments and errors as in ``load_base``."""
    return load_base(folder, dtype, scratch).hf


def load_base(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    scratch: Path | None = None,
    values: bool = True,
) -> Base:
    """The base in a folder; raises InputError or UnsupportedModelError.

    ``scratch``: a folder for large float32 weights, which are then mapped instead of held in
    memory. Without ``values`` only the headers of its files are read, and all tensors are on
    torch's meta device.

    transformers would fill what the files lack with random numbers and leave out what it does not
    know, so such a folder is refused, as are weights that are not finite.
    """
    config = read_config(folder)
    stored = stored_tensors(folder)
    weights: dict[str, Tensor] | None = None  # None: transformers reads them
    if not values:
        weights = {
            name: torch.empty(found.shape, dtype=dtype, device="meta")
            for name, found in stored.items()
        }
    elif scratch is not None:
        weights = {
            name: mapped(_finite(folder, name, tensor), scratch)
            for name, tensor in _tensors(stored)
        }
    hf, found = _from_library(folder, config, weights, dtype)
    unread = found["unexpected_keys"]
    _check_keys(folder, config, found)
    notes = unread_notes(folder, unread)
    if weights is None:
        for name, tensor in hf.named_parameters():
            _finite(folder, name, tensor)
    read = {name: tensor.elements for name, tensor in stored.items() if name not in unread}
    return Base(hf.eval(), read, notes)


def _check_keys(folder: Path, config: Any, found: Any) -> None:
    """Raise InputError unless a folder's weights are those that its config asks for.

    ``found``: what transformers says of names that did not fit.
    """
    for name, stored, asked in sorted(found["mismatched_keys"]):
        raise InputError(
            f"{folder}: {name} is {list(stored)} in the weights and {list(asked)} by config.json"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        wrapped = wrapper_note(missing, found["unexpected_keys"])
        raise InputError(
            f"{folder}: the weights lack {missing[0]} and {len(missing) - 1} more "
            f"that config.json asks for{wrapped}"
        )
    layers = config.num_hidden_layers
    for name in sorted(found["unexpected_keys"]):
        layer = LAYER.match(name)
        if layer is not None and int(layer[1]) >= layers:
            raise InputError(f"{folder}: the weights have {name}, config.json only {layers} layers")


def _from_library(
    folder: Path, config: Any, weights: dict[str, Tensor] | None, dtype: torch.dtype
) -> tuple[Any, Any]:
    """transformers' model of a folder or of ``weights``, and the names that did not fit."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    wanted: Any = {
        "config": config,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    try:
        if weights is None:
            automatic: Any = AutoModelForCausalLM
            found: tuple[Any, Any] = automatic.from_pretrained(
                folder, local_files_only=True, **wanted
            )
            return found
        if any(tensor.is_meta for tensor in weights.values()):
            wanted["device_map"] = "meta"
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return kind.from_pretrained(None, state_dict=weights, **wanted)  # type: ignore[no-any-return]
    except (*REFUSALS, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"{folder}: the model cannot be loaded ({first_line(error)})") from error


def _tensors(stored: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor and its name; only one at a time is in memory."""
    for name, found in stored.items():
        # Pages of a file stay in memory until it is closed, so it is opened for each tensor.
        with safe_open(str(found.file), framework="pt") as tensors:
            yield name, tensors.get_tensor(name)


def _finite(folder: Path, name: str, values: Tensor) -> Tensor:
    """``values``; raises InputError if one of them is NaN or infinite."""
    if not values.numel() or not values.is_floating_point():
        return values
    # Both are finite if all values are; they take one pass and no copy.
    least, most = torch.aminmax(values.detach())
    if not torch.isfinite(least) or not torch.isfinite(most):
        raise InputError(
            f"{folder}: {name} has values that are not finite: "
            "the weights are damaged, get them again"
        )
    return values


def adopt(hf: Any, calibrated: Mapping[str, Tensor]) -> Any:
    """The model with copies of other values, by name, for some of its weights."""
    for name, values in calibrated.items():
        hf.get_parameter(name).data.copy_(values)
        release()
    return hf


def build(
    hf: Any, config: StreamConfig | None, context: int, gamma: int | None = None
) -> StreamModel:
    """A StreamModel of a loaded base with fresh streams.

    ``config`` None: without streams; the host may then draft ``gamma`` tokens. ``context``: tokens
    of a conversation; position tables are longer, by POSITION_MARGIN.
    """
    backbone = Backbone(hf, context, context + POSITION_MARGIN)
    if config is None:
        return StreamModel(backbone, None, gamma or 0)
    return StreamModel(backbone, Streams(backbone, config), gamma or config.gamma)


POSITION_MARGIN = 1024
"""Rows of the position tables beyond the context.

Enough for the largest prefill chunk or tree depth, plus streams.
"""


def load(
    folder: Path,
    adapter: Path | None,
    context: int,
    gamma: int | None = None,
    merge: bool = True,
    calibrated: Mapping[str, Tensor] | None = None,
    scratch: Path | None = None,
    identity: BaseIdentity | None = None,
    values: bool = True,
) -> LoadedModel:
    """The base in ``folder`` with the app in ``adapter``; raises InputError.

    An adapter without ``streams.json`` is a plain PEFT LoRA.

    - ``gamma``: how many of its streams to keep.
    - ``merge``: merge its LoRA into the base's weights instead of keeping it as ``LoraLinear``.
    - ``calibrated``: see ``adopt``.
    - ``scratch``, ``values``: see ``load_base``.
    - ``identity``: the base's, if known.
    """
    hf = adopt(load_base(folder, scratch=scratch, values=values).hf, calibrated or {})
    if identity is None:
        identity = BaseIdentity.of(folder, hf.config)
    with nullcontext() if values else _no_values():
        opened = Adapter(None, None, False)
        if adapter is not None:
            opened = AdapterFolder.open(adapter, identity)
            if opened.has_lora:
                hf = merge_lora(hf, adapter) if merge else attach_lora(hf, adapter)
        config = opened.settings.streams if opened.settings is not None else None
        if config is not None and gamma is not None and gamma > config.gamma:
            raise UnsupportedModelError(
                f"the tree needs {gamma} streams, the adapter was trained with {config.gamma}"
            )
        model = build(hf, config, context, gamma)
        if model.streams is not None and adapter is not None:
            load_streams(adapter, model.streams)
            model.take_draft_rows()
    release()
    return LoadedModel(identity, model.eval(), opened.settings)


@contextmanager
def _no_values() -> Iterator[None]:
    """In this context new tensors are on the meta device.

    Warnings that copies into them do nothing are not shown.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
