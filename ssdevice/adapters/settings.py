"""The settings in an adapter folder: its base, its app, and how its streams are built."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ssdevice.adapters.base_files import weights_sha256
from ssdevice.adapters.slots import Variant
from ssdevice.bundle.manifest import AdapterKind, App, ModelIdentity
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
    def of(cls, folder: Path, config: Any) -> Self:
        """The identity of a Hugging Face folder with this config."""
        return cls(
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            layers=config.num_hidden_layers,
            vocab=config.vocab_size,
            sha256=weights_sha256(folder),
        )

    def check(self, other: "BaseIdentity | ModelIdentity", what: str) -> None:
        """Raise InputError, which names the first difference, if ``other`` is not this base."""
        for name, own in vars(self).items():
            found = getattr(other, name)
            if own != found:
                raise InputError(
                    f"{what} was trained for another base: its {name} is {own}, "
                    f"the model's is {found}"
                )


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
            raise ConfigError(
                f"schema_version is {self.schema_version}, this ssdevice reads {SCHEMA_VERSION}"
            )


def read_settings(folder: Path) -> AdapterSettings:
    """The settings in an adapter folder; raises ConfigError."""
    return load_strict(AdapterSettings, read_json(folder / SETTINGS), str(folder / SETTINGS))


@dataclass(frozen=True)
class Adapter:
    """What an app adds to the base: its ``folder``, None for the bare base.

    ``settings``: of its streams; None for plain decoding only. ``has_lora``: whether its main rows
    differ from the base's.
    """

    folder: Path | None
    settings: AdapterSettings | None
    has_lora: bool

    @property
    def mode(self) -> Mode | None:
        """The mode of its streams; None without streams."""
        return self.settings.streams.mode if self.settings is not None else None

    @property
    def msa_layers(self) -> int:
        """N_s; 0 without streams."""
        return self.settings.streams.msa_layers if self.settings is not None else 0

    @property
    def draft_layers(self) -> int:
        """Layers of its own that draft; 0 without them."""
        return self.settings.streams.draft_layers if self.settings is not None else 0

    @property
    def instruction(self) -> str:
        """What it puts before prompts; empty without one."""
        return self.settings.instruction if self.settings is not None else ""

    @property
    def variant(self) -> Variant:
        """The kind of graphs that it needs.

        Raises InputError for streams that cannot share a bundle.
        """
        streams = self.settings.streams if self.settings is not None else None
        return Variant.of(streams, self.has_lora)

    def rank(self) -> int:
        """The largest rank of its LoRA; 0 without one.

        Raises ConfigError for a PEFT config that cannot be read.
        """
        if self.folder is None or not self.has_lora:
            return 0
        config = read_json(self.folder / PEFT_CONFIG)
        largest = int(config.get("r", 0))
        patterns = config.get("rank_pattern") or {}
        for rank in patterns.values():
            largest = max(largest, int(rank))
        return largest

    def entry(self, name: str, base_sha256: str, kind: AdapterKind, **stored: Any) -> App:
        """Its app's entry in a manifest.

        ``kind``: of a folder. ``stored``: ``folder``, ``files``, ``functions``.
        """
        return App(
            name=name,
            kind=kind if self.folder is not None else AdapterKind.BASE,
            base_sha256=base_sha256,
            mode=self.mode,
            msa_layers=self.msa_layers,
            instruction=self.instruction,
            rank=self.rank(),
            **stored,
        )


@dataclass(frozen=True)
class AdapterFolder(Adapter):
    """An adapter in a folder of its own."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, base: BaseIdentity | None = None) -> Self:
        """The adapter in a folder.

        Raises InputError if a file is missing, without which the adapter would be used without its
        LoRA or its streams, in silence; also if the adapter is not for ``base``.
        """
        if not folder.is_dir():
            raise InputError(f"adapter {folder}: no such folder")
        has_streams = (folder / SETTINGS).is_file()
        has_lora = (folder / PEFT_CONFIG).is_file()
        if not has_streams and not has_lora:
            # PEFT writes an adapter that has a name into a folder of this name.
            inside = sorted(file.parent.name for file in folder.glob(f"*/{PEFT_CONFIG}"))
            found = f" (that is in {', '.join(inside[:3])})" if inside else ""
            raise InputError(
                f"{folder}: neither {SETTINGS} nor {PEFT_CONFIG}{found}; expected an adapter folder"
            )
        for weights, described in ((WEIGHTS, SETTINGS), (PEFT_WEIGHTS, PEFT_CONFIG)):
            if (folder / weights).exists() and not (folder / described).is_file():
                raise InputError(
                    f"{folder}: {weights} without {described}; copy the whole adapter folder"
                )
        settings = read_settings(folder) if has_streams else None
        if settings is not None and settings.streams.trains_lora and not has_lora:
            raise InputError(
                f"{folder}: trained with a LoRA of rank {settings.streams.lora_rank}, "
                f"but there is no {PEFT_CONFIG}; copy the whole adapter folder"
            )
        if settings is not None and base is not None:
            settings.base.check(base, f"adapter {folder}")
        return cls(folder, settings, has_lora)

    def check_apart(self) -> None:
        """Raise InputError for lossless streams over a LoRA, which need a bundle of their own.

        Where apps share a base, stream rows would need the LoRA and their own adapters beside every
        linear.
        """
        if self.has_lora and self.mode is Mode.LOSSLESS:
            raise InputError(
                f"{self.folder}: lossless streams over a LoRA cannot share a bundle with other "
                "apps yet: export this app by itself"
            )
