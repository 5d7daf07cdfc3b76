"""The slots of a bundle's graphs: the table that an export writes and that adapters must fit.

A **slot** is a pair of tensors beside one product of the base: ``y = base(x) + (x @ down) @ up``.
Graphs take them as inputs, with a rank that every app chooses; a program has them as state of one
rank, filled up with zeros.

Linears that read the same input may share a slot: their ``down`` are concatenated into one product,
and each keeps its own ``up`` (one block-diagonal ``up`` was slower from rank 32 on).

A **variant** is a set of graphs for one kind of app; all variants read the same weights of the
base.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from ssdevice.config import Mode, StreamConfig, StreamMLP, load_strict, read_json
from ssdevice.contract import ONE_ROW, PREFILL, TensorSpec
from ssdevice.errors import ConfigError, InputError

LAYOUT_FILE = "slots.json"
LAYOUT_ROLE = "slots"
IDENTIFIERS = "streams.identifiers"
"""Name of the graph input that holds the stream identifiers ``[γ, hidden]``."""
SCHEMA_VERSION = 2
EXAMPLE_RANK = 3
"""Rank of the factors with which a variant is traced; its graphs do not depend on it."""


class SlotKind(StrEnum):
    """Whose factors a slot takes: the app's LoRA's, or its streams'."""

    LORA = "lora"
    STREAM = "stream"


@dataclass(frozen=True)
class Slot:
    """The factors of linears that read the same ``inputs`` values.

    - ``sources``: the linears' names in the adapter folder, empty for one without factors.
    - ``outputs``: how many values each linear gives.
    - ``int8``: whether ``down`` is int8 with one scale per column.
    - ``state``, ``rank``: of a slot that is a program's state, with tensors ``<state>.down [1,
      inputs, rank]`` and ``<state>.up [1, rank, outputs]``.
    """

    kind: SlotKind
    sources: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    int8: bool = False
    state: str = ""
    rank: int = 0

    def __post_init__(self) -> None:
        sizes: tuple[int, ...] = (self.inputs, *self.outputs)
        if self.state:
            sizes = (*sizes, self.rank)
        if not self.outputs or len(self.sources) != len(self.outputs) or min(sizes) < 1:
            raise ConfigError(f"slot {self.sources}: one size for each, all 1 or more, not {sizes}")

    @property
    def name(self) -> str:
        """The prefix of its tensors' names."""
        if self.state:
            return self.state
        first, *others = [source for source in self.sources if source]
        parts = [f"{self.kind}.{first}"]
        for other in others:
            _, _, leaf = other.replace("-", ".").rpartition(".")
            parts.append(leaf)
        return "|".join(parts)

    @property
    def down(self) -> TensorSpec:
        """``[inputs, rank]``, where rank is the sum over all linears."""
        dtype = "int8" if self.int8 else "float32"
        return TensorSpec(f"{self.name}.down", (self.inputs, self._rank), dtype)

    @property
    def down_scale(self) -> TensorSpec:
        """``[rank]``, the scales of an int8 ``down``."""
        return TensorSpec(f"{self.name}.down_scale", (self._rank,), "float32")

    @property
    def ranks(self) -> TensorSpec:
        """``[linears]``: how many columns of ``down`` belong to each linear; only with several."""
        return TensorSpec(f"{self.name}.ranks", (len(self.outputs),), "int64")

    @property
    def ups(self) -> tuple[TensorSpec, ...]:
        """``[rank of the linear, its outputs]`` by linear."""
        if len(self.outputs) == 1:
            return (TensorSpec(f"{self.name}.up", (self._rank, *self.outputs), "float32"),)
        return tuple(
            TensorSpec(f"{self.name}.up.{i}", (f"{self._rank}.{i}", size), "float32")
            for i, size in enumerate(self.outputs)
        )

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, in the order in which graphs take them."""
        scale = (self.down_scale,) if self.int8 else ()
        ranks = (self.ranks,) if len(self.outputs) > 1 else ()
        return (self.down, *scale, *ranks, *self.ups)

    @property
    def _rank(self) -> str:
        return f"{self.name}.rank"


@dataclass(frozen=True)
class Variant:
    """Graphs for one kind of app: with streams, with a LoRA on main rows, or neither.

    - ``streams``: their kind, with one stream, and ``EXAMPLE_RANK`` for ranks that apps choose.
    - ``functions``: the contract's name -> the target's (a file, or a name in a program).
    - ``identifiers``: name of the tensor for the stream identifiers ``[γ, hidden]``; empty without
      one.
    """

    lora: bool
    streams: StreamConfig | None = None
    functions: dict[str, str] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    identifiers: str = ""

    @classmethod
    def of(cls, streams: StreamConfig | None, has_lora: bool) -> Self:
        """The variant that an app needs, without graphs.

        Raises InputError for streams that cannot share a bundle.
        """
        if streams is None:
            return cls(has_lora)
        if streams.draft_vocabulary:
            raise InputError(
                f"streams that choose among {streams.draft_vocabulary} tokens cannot share a "
                "bundle with other apps yet: export this app by itself, "
                "or train it with --draft-vocabulary 0"
            )
        if streams.follow_rank:
            raise InputError(
                "streams whose drafts follow each other (follow_rank) cannot share a bundle with "
                "other apps yet: export this app by itself, or train it with --follow-rank 0"
            )
        if streams.draft_layers:
            raise InputError(
                "streams of draft layers cannot share a bundle with other apps yet: "
                "export this app by itself, or train it with --draft-layers 0"
            )
        lossless = streams.mode is Mode.LOSSLESS
        kind = replace(
            streams,
            gamma=1,
            init_rank=EXAMPLE_RANK if streams.init_rank else 0,
            token_rank=EXAMPLE_RANK if streams.token_rank else 0,
            adapter_rank=EXAMPLE_RANK,
            lora_rank=0,
            stream_mlp=streams.stream_mlp if lossless else StreamMLP.BASE_ADAPTER,
        )
        return cls(not lossless, kind)

    def own(self, names: Iterable[str]) -> list[str]:
        """The contract's functions among ``names`` that its apps have."""
        return [name for name in names if self.streams is not None or name in (PREFILL, *ONE_ROW)]

    @property
    def name(self) -> str:
        """Its name in a bundle, such as ``lossless4-g``."""
        streams = self.streams
        if streams is None:
            return "lora" if self.lora else "base"
        name = f"{streams.mode}{streams.msa_layers}"
        if streams.stream_mlp is StreamMLP.ADAPTER:
            name += "-mlp"
        elif streams.stream_mlp is StreamMLP.ADAPTER_ONLY:
            name += "-only"
        if streams.init_rank:
            name += "-f"
        if streams.token_rank:
            name += "-g"
        return name

    @property
    def described(self) -> str:
        """Its kind of app, in words."""
        streams = self.streams
        if streams is None:
            return "plain decoding with a LoRA" if self.lora else "plain decoding"
        words = f"{streams.mode} streams with N_s = {streams.msa_layers}"
        if streams.stream_mlp is not StreamMLP.BASE_ADAPTER:
            words += f", stream_mlp {streams.stream_mlp}"
        if streams.init_rank:
            words += ", f of eq. 3"
        if streams.token_rank:
            words += ", that see the chosen token"
        return words


@dataclass(frozen=True)
class SlotLayout:
    """``slots.json``: all variants of a bundle. ``hidden``: width of a stream identifier."""

    hidden: int
    variants: tuple[Variant, ...]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(
                f"schema_version is {self.schema_version}, expected {SCHEMA_VERSION}: "
                "export the bundle again"
            )

    def variant(self, name: str) -> Variant | None:
        """The variant of this name; None if there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        return None


def read_layout(file: Path) -> SlotLayout:
    """The layout in a file; raises ConfigError."""
    return load_strict(SlotLayout, read_json(file), str(file))
