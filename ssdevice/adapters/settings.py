"""What an adapter folder says of itself: for which base and app, and how its streams are built."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssdevice.bundle.manifest import ModelIdentity
from ssdevice.config import StreamConfig, load_strict, read_json
from ssdevice.errors import ConfigError, InputError

SETTINGS = "streams.json"
WEIGHTS = "streams.safetensors"
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
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

    def check(self, other: BaseIdentity | ModelIdentity, what: str) -> None:
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
