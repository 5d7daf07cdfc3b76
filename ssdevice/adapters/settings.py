"""The settings in an adapter folder: its base, its app, and how its streams are built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssdevice.adapters.base_files import weights_sha256
from ssdevice.bundle.manifest import ModelIdentity
from ssdevice.config import Mode, StreamConfig, load_strict, read_json
from ssdevice.errors import ConfigError, InputError

SETTINGS = "streams.json"
WEIGHTS = "streams.safetensors"
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BaseIdentity:
    """The base that an adapter was trained for; ``sha256``: see ``weights_sha256``."""

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
        """Raise InputError, which names the first difference, if ``other`` is not this base."""
        for name in ("model_type", "hidden_size", "layers", "vocab", "sha256"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise InputError(f"{what} was trained for another base: its {name} is {mine}, the model's is {theirs}")


@dataclass(frozen=True)
class AdapterSettings:
    """``streams.json``: the streams, their base and app, and how they were trained."""

    app: str
    streams: StreamConfig
    base: BaseIdentity
    instruction: str = ""
    training: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(f"schema_version is {self.schema_version}, this ssdevice reads {SCHEMA_VERSION}")


def read_settings(folder: Path) -> AdapterSettings:
    """The settings in an adapter folder; raises ConfigError."""
    return load_strict(AdapterSettings, read_json(folder / SETTINGS), str(folder / SETTINGS))


@dataclass(frozen=True)
class AdapterFolder:
    """A valid adapter folder. ``settings``: None for a LoRA of PEFT without streams."""

    folder: Path
    settings: AdapterSettings | None
    has_lora: bool

    @classmethod
    def open(cls, folder: Path, base: BaseIdentity | None = None) -> AdapterFolder:
        """Check which files a folder has. Raises InputError, also if the adapter is not for ``base``.

        A folder that lacks one of its files would otherwise be used without its LoRA or its streams, in silence.
        """
        if not folder.is_dir():
            raise InputError(f"adapter {folder}: no such folder")
        has_streams, has_lora = (folder / SETTINGS).is_file(), (folder / PEFT_CONFIG).is_file()
        if not has_streams and not has_lora:
            inside = sorted(file.parent.name for file in folder.glob(f"*/{PEFT_CONFIG}"))  # PEFT's, of a named adapter
            found = f" (that is in {', '.join(inside[:3])})" if inside else ""
            raise InputError(f"{folder}: neither {SETTINGS} nor {PEFT_CONFIG}{found}; expected an adapter folder")
        for weights, described in ((WEIGHTS, SETTINGS), (PEFT_WEIGHTS, PEFT_CONFIG)):
            if (folder / weights).exists() and not (folder / described).is_file():
                raise InputError(f"{folder}: {weights} without {described}; copy the whole adapter folder")
        settings = read_settings(folder) if has_streams else None
        if settings is not None and settings.streams.trains_lora and not has_lora:
            raise InputError(
                f"{folder}: trained with a LoRA of rank {settings.streams.lora_rank}, but there is no {PEFT_CONFIG}; "
                "copy the whole adapter folder"
            )
        if settings is not None and base is not None:
            settings.base.check(base, f"adapter {folder}")
        return cls(folder, settings, has_lora)

    def check_apart(self) -> None:
        """Raise InputError for lossless streams over a LoRA, which fit only into a bundle of their own.

        Where apps share a base, stream rows would need the LoRA and their own adapters beside every linear.
        """
        if self.has_lora and self.settings is not None and self.settings.streams.mode is Mode.LOSSLESS:
            raise InputError(
                f"{self.folder}: lossless streams over a LoRA cannot share a bundle with other apps yet: export this "
                "app by itself"
            )
