"""An app's adapter folder: PEFT's files for the LoRA, ``streams.safetensors`` and ``streams.json`` for the streams."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ssdevice.config import StreamConfig, load_strict, read_json, to_json
from ssdevice.errors import ConfigError, InputError
from ssdevice.model.streams import Streams

SETTINGS = "streams.json"
WEIGHTS = "streams.safetensors"
PEFT_CONFIG = "adapter_config.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BaseIdentity:
    """Which base an adapter was trained for; ``sha256`` is of the weight files' contents."""

    model_type: str
    hidden_size: int
    layers: int
    vocab: int
    sha256: str

    @classmethod
    def of(cls, folder: Path, config: Any) -> BaseIdentity:
        """The identity of a Hugging Face folder with this config."""
        return cls(
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            layers=config.num_hidden_layers,
            vocab=config.vocab_size,
            sha256=weights_sha256(folder),
        )

    def check(self, other: BaseIdentity, what: str) -> None:
        """Raise InputError if ``other`` is not this base, naming the first difference."""
        for name in ("model_type", "hidden_size", "layers", "vocab", "sha256"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise InputError(f"{what} was trained for another base: its {name} is {mine}, the model's is {theirs}")


@dataclass(frozen=True)
class AdapterSettings:
    """``streams.json``: what the streams are, for which base and app, and how they came to be."""

    app: str
    streams: StreamConfig
    base: BaseIdentity
    instruction: str = ""
    training: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(f"schema_version is {self.schema_version}, this ssdevice reads {SCHEMA_VERSION}")


def weights_sha256(folder: Path) -> str:
    """sha256 over the names and contents of a folder's ``*.safetensors`` files, in name order."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder}: no .safetensors weights")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_settings(folder: Path) -> AdapterSettings:
    """The settings in an adapter folder; raises ConfigError."""
    return load_strict(AdapterSettings, read_json(folder / SETTINGS), str(folder / SETTINGS))


def write_streams(folder: Path, streams: Streams, settings: AdapterSettings) -> None:
    """Write ``streams.safetensors`` (float32) and ``streams.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().float().cpu().contiguous() for name, value in streams.state_dict().items()}
    save_file(weights, str(folder / WEIGHTS))
    text = json.dumps(to_json(settings), indent=2, ensure_ascii=False)
    (folder / SETTINGS).write_text(text + "\n", encoding="utf-8")


def load_streams(folder: Path, streams: Streams) -> None:
    """Load trained weights into ``streams``; raises InputError for missing, foreign or non-finite tensors."""
    file = folder / WEIGHTS
    try:
        weights = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: cannot be read as safetensors ({error})") from error
    expected = {name: tuple(value.shape) for name, value in streams.state_dict().items()}
    for name, shape in expected.items():
        if name not in weights:
            raise InputError(f"{file}: tensor {name!r} is missing")
        if tuple(weights[name].shape) != shape:
            raise InputError(f"{file}: tensor {name!r} has shape {list(weights[name].shape)}, expected {list(shape)}")
    for name, value in weights.items():
        if name not in expected:
            raise InputError(f"{file}: unexpected tensor {name!r}")
        if not torch.isfinite(value).all():
            raise InputError(f"{file}: tensor {name!r} has values that are not finite")
    streams.load_state_dict(weights)
