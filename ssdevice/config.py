"""Settings of Speculative Streaming as frozen dataclasses, and the strict loader for them."""

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ssdevice import strict_json
from ssdevice.errors import ConfigError, check_no_pointer, reading
from ssdevice.rules import Rule, Ruled, within

T = TypeVar("T")
RANK: Rule = within(0, 1 << 14)
"""Bounded, because memory is allocated by ranks before any weights are read."""
STREAM_TERMS = "msa_layers", "init_rank", "token_rank", "follow_rank", "adapter_rank"
"""What a ``StreamConfig`` has for streams in layers of the base: numbers, 0 with draft layers."""
MIN_DRAFT_VOCABULARY = 16
MAX_DRAFT_VOCABULARY = 1 << 20


class Mode(StrEnum):
    """What main rows compute: with the app's LoRA (``shared``), or exactly the base
    (``lossless``).
    """

    SHARED = "shared"
    LOSSLESS = "lossless"


class StreamMLP(StrEnum):
    """The MLP of stream rows in lossless mode: the base MLP with the adapter, or the adapter in its
    place.

    ``adapter-only`` has no other adapters, and this one is linear (the successor's figure 2a and
    appendix J).
    """

    ADAPTER_ONLY = "adapter-only"
    ADAPTER = "adapter"
    BASE_ADAPTER = "base+adapter"


class Schedule(StrEnum):
    """When streams run: those of every node with the main rows (``fused``), or of the end node
    later (``deferred``).
    """

    FUSED = "fused"
    DEFERRED = "deferred"


@dataclass(frozen=True)
class StreamConfig(Ruled):
    """How streams are built and trained; part of ``streams.json`` beside the weights.

    ``gamma``: γ streams. ``msa_layers``: N_s; 0 for heads of rank ``adapter_rank`` on the last
    hidden state, which share the LM head. ``init_rank``: rank η of f = UV in 2402.11131 eq. 3 (0:
    the identity). ``token_rank``: rank of g, by which each stream also sees the token that the main
    stream has just chosen (0: as in the paper, not); their schedule is then ``deferred``.
    ``follow_rank``: rank of the term by which a draft sees the token before it, an idea of Hydra
    (2402.05109; 0: drafts do not depend on each other). ``adapter_rank``: rank R_s of the stream
    adapters of the MSA layers in lossless mode (*Speculative Streaming: Efficient and Scalable
    Speculative Decoding with Multi-Stream Attention*, appendix H.2). ``draft_layers``: layers of
    its own that draft one token after the other, like EAGLE's (2401.15077, 2503.01840), in lossless
    mode and instead of streams; no rank applies then. ``lora_rank``: rank of the PEFT LoRA in
    shared mode (0: none). ``draft_vocabulary``: how many tokens streams choose among (0: all);
    their ids are stored with the weights.
    """

    mode: Mode = Mode.SHARED
    gamma: int = field(default=4, metadata=within(1, 32))
    msa_layers: int = field(default=4, metadata={"minimum": 0})
    init_rank: int = field(default=0, metadata=RANK)
    token_rank: int = field(default=0, metadata=RANK)
    follow_rank: int = field(default=0, metadata=RANK)
    adapter_rank: int = field(default=8, metadata=RANK)
    stream_mlp: StreamMLP = StreamMLP.BASE_ADAPTER
    draft_layers: int = field(default=0, metadata=within(0, 8))
    lora_rank: int = field(default=32, metadata=RANK)
    draft_vocabulary: int = field(default=0, metadata=within(0, MAX_DRAFT_VOCABULARY))

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.draft_vocabulary < MIN_DRAFT_VOCABULARY:
            raise ConfigError(
                f"draft_vocabulary is {self.draft_vocabulary}, expected 0 (all tokens) or "
                f"{MIN_DRAFT_VOCABULARY} to {MAX_DRAFT_VOCABULARY}"
            )
        if self.draft_layers:
            if self.mode is not Mode.LOSSLESS:
                raise ConfigError("draft_layers need lossless mode")
            for name in STREAM_TERMS:
                if getattr(self, name):
                    raise ConfigError(f"{name} is {getattr(self, name)}: draft layers do without")
            return
        if self.mode is Mode.LOSSLESS and self.adapter_rank < 1:
            raise ConfigError(
                "lossless mode needs adapter_rank of 1 or more: only stream rows are trained"
            )
        if not self.msa_layers and self.adapter_rank < 1:
            raise ConfigError(
                "without MSA layers adapter_rank is the rank of the heads: it must be 1 or more"
            )

    @property
    def waits(self) -> bool:
        """Whether drafts can only be made after the next token was chosen, which they see."""
        return self.token_rank > 0 or self.draft_layers > 0

    @property
    def trains_lora(self) -> bool:
        """Whether main rows have a LoRA that was trained with these streams."""
        return self.mode is Mode.SHARED and self.lora_rank > 0

    def check_layers(self, layers: int) -> None:
        """Raise ConfigError unless N_s < N: streams start from a lower layer's hidden state."""
        if self.msa_layers >= layers:
            raise ConfigError(
                f"N_s = {self.msa_layers} MSA layers need a model of more layers, this one has "
                f"{layers}"
            )


def load_strict(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """Build dataclass ``cls`` from plain JSON: enums from their values, tuples from lists,
    dataclasses from objects.

    Raises ConfigError for unknown keys and wrong types, naming ``where``, the key, and the nearest
    known name.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected an object, found {_json_name(data)}")
    hints = _type_hints(cls)  # type: ignore[arg-type]
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"{where}: {strict_json.unknown_key(str(key), fields)}")
    values = {}
    for name, each in fields.items():
        if name in data:
            values[name] = _coerce(hints[name], data[name], f"{where}.{name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: {name!r} is missing")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


_type_hints = functools.cache(typing.get_type_hints)
"""Cached, because a manifest of thousands of files loads as many small objects."""


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin is types.UnionType:  # of plain types, or of one and None
        kinds = typing.get_args(hint)
        own = next((kind for kind in kinds if type(value) is kind), kinds[0])
        return _coerce(own, value, where)
    if origin is tuple and isinstance(value, list):
        return _items(typing.get_args(hint), value, where)
    if origin in (dict, Mapping) and isinstance(value, dict):
        kind = typing.get_args(hint)[1]
        return {
            str(key): _coerce(kind, item, f"{where}[{str(key)[:60]!r}]")
            for key, item in value.items()
        }
    if isinstance(hint, type):
        return _plain(hint, value, where)
    name = origin.__name__ if isinstance(origin, type) else str(origin)
    raise _unexpected(name, value, where)


def _items(kinds: tuple[Any, ...], value: list[Any], where: str) -> tuple[Any, ...]:
    """A list as a tuple of these kinds; ``(kind, ...)``: of any length."""
    if kinds[1:] == (Ellipsis,):
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise ConfigError(f"{where}: expected {len(kinds)} values, found {len(value)}")
    return tuple(_coerce(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))


def _plain(hint: type, value: Any, where: str) -> Any:
    """A value of one type: an enum, a dataclass, one with a form of its own, or plain JSON."""
    if issubclass(hint, Enum):
        choices = [member.value for member in hint]
        if value in choices:
            return hint(value)
        raise ConfigError(
            f"{where}: {str(value)[:60]!r} is not one of {', '.join(map(str, choices))}"
        )
    if hasattr(hint, "from_json"):
        try:
            return hint.from_json(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if dataclasses.is_dataclass(hint):
        return load_strict(hint, value, where)
    if hint is float and type(value) in (int, float):
        # NaN and infinities are not JSON, but Python's reader accepts them and reads 1e999 as
        # infinity.
        if abs(value) <= sys.float_info.max:
            return float(value)
        raise ConfigError(f"{where}: {str(value)[:60]} is not a finite number")
    if type(value) is hint:
        return value
    raise _unexpected(hint.__name__, value, where)


def _unexpected(name: str, value: Any, where: str) -> ConfigError:
    expected = JSON_NAMES.get(name, name)
    return ConfigError(f"{where}: expected {expected}, found {_json_name(value)}")


JSON_NAMES = {
    "tuple": "a list",
    "list": "a list",
    "dict": "an object",
    "Mapping": "an object",
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "NoneType": "null",
}
"""Python's types -> their names in JSON."""


def _json_name(value: Any) -> str:
    return JSON_NAMES.get(type(value).__name__, type(value).__name__)


def to_json(value: Any) -> Any:
    """Plain JSON values of a dataclass, as ``load_strict`` reads them."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def read_json(path: Path) -> Any:
    """The JSON value in a UTF-8 file.

    Raises ConfigError, which names the file and the place. See ``strict_json``.
    """
    check_no_pointer(path)
    with reading(path, ConfigError):
        return strict_json.parse(path.read_bytes(), str(path))
