"""The slots of a bundle's graphs: the layout that an export writes and that adapters must fit.

A **slot** is a pair of graph inputs beside one product of the base: ``y = base(x) + (x @ down) @ up``, with a rank that
every app chooses. Linears that read the same input share a slot: their ``down`` are concatenated into one product, and
each has its own ``up`` (one block-diagonal ``up`` was slower from rank 32 on). A **variant** is a set of graphs for one
kind of app; all variants read the same weights of the base.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ssdevice.config import Mode, StreamConfig, StreamMLP, load_strict, read_json
from ssdevice.contract import TensorSpec
from ssdevice.errors import ConfigError, InputError

LAYOUT_FILE = "slots.json"
LAYOUT_ROLE = "slots"
IDENTIFIERS = "streams.identifiers"
"""Name of the graph input that holds the stream identifiers ``[γ, hidden]``."""
SCHEMA_VERSION = 1


class SlotKind(StrEnum):
    """Which factors a slot takes: those of the app's LoRA or those of its streams."""

    LORA = "lora"
    STREAM = "stream"


@dataclass(frozen=True)
class SlotPart:
    """One linear of a slot. ``source``: its name in the adapter folder, empty for a linear that takes no factors."""

    source: str
    outputs: int

    def __post_init__(self) -> None:
        if self.outputs < 1:
            raise ConfigError(f"slot part {self.source!r}: outputs {self.outputs}, expected 1 or more")


@dataclass(frozen=True)
class Slot:
    """The factors of linears that read the same ``inputs`` values; ``int8``: ``down`` has one scale per column."""

    kind: SlotKind
    inputs: int
    int8: bool
    parts: tuple[SlotPart, ...]

    @property
    def name(self) -> str:
        """The prefix of its tensors' names."""
        first, *others = [part.source for part in self.parts if part.source]
        return "|".join([f"{self.kind}.{first}", *(other.replace("-", ".").rpartition(".")[2] for other in others)])

    @property
    def outputs(self) -> int:
        """Number of columns of all parts together."""
        return sum(part.outputs for part in self.parts)

    @property
    def down(self) -> TensorSpec:
        """``[inputs, rank]``, where rank is the sum over all parts."""
        return TensorSpec(f"{self.name}.down", (self.inputs, self._rank), "int8" if self.int8 else "float32")

    @property
    def down_scale(self) -> TensorSpec:
        """``[rank]``, the scales of an int8 ``down``."""
        return TensorSpec(f"{self.name}.down_scale", (self._rank,), "float32")

    @property
    def ranks(self) -> TensorSpec:
        """``[parts]``: the number of columns of ``down`` that belong to each part; only with several parts."""
        return TensorSpec(f"{self.name}.ranks", (len(self.parts),), "int64")

    @property
    def ups(self) -> tuple[TensorSpec, ...]:
        """``[rank of the part, outputs of the part]`` by part."""
        if len(self.parts) == 1:
            return (TensorSpec(f"{self.name}.up", (self._rank, self.outputs), "float32"),)
        return tuple(
            TensorSpec(f"{self.name}.up.{i}", (f"{self._rank}.{i}", part.outputs), "float32")
            for i, part in enumerate(self.parts)
        )

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The graph inputs of this slot."""
        scale = (self.down_scale,) if self.int8 else ()
        ranks = (self.ranks,) if len(self.parts) > 1 else ()
        return (self.down, *scale, *ranks, *self.ups)

    @property
    def _rank(self) -> str:
        return f"{self.name}.rank"


@dataclass(frozen=True)
class Variant:
    """Graphs for one kind of app: with streams (then ``mode`` is set), with a LoRA on main rows, or neither.

    ``functions``: the contract's name -> the file of its graph.
    """

    lora: bool
    mode: Mode | None = None
    msa_layers: int = 0
    stream_mlp: StreamMLP | None = None
    transform: bool = False
    token: bool = False
    functions: dict[str, str] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()

    @classmethod
    def of(cls, streams: StreamConfig | None, has_lora: bool) -> Variant:
        """The variant that an app needs, without graphs."""
        if streams is None:
            return cls(has_lora)
        if streams.draft_vocabulary:
            raise InputError(
                f"streams that choose among {streams.draft_vocabulary} tokens cannot share a bundle with other apps "
                "yet: export this app by itself, or train it with --draft-vocabulary 0"
            )
        if streams.follow_rank:
            raise InputError(
                "streams whose drafts follow each other (follow_rank) cannot share a bundle with other apps yet: "
                "export this app by itself, or train it with --follow-rank 0"
            )
        lossless = streams.mode is Mode.LOSSLESS
        return cls(
            lora=not lossless,
            mode=streams.mode,
            msa_layers=streams.msa_layers,
            stream_mlp=streams.stream_mlp if lossless else None,
            transform=streams.init_rank > 0,
            token=streams.token_rank > 0,
        )

    @property
    def name(self) -> str:
        """The name that its files contain."""
        if self.mode is None:
            return "lora" if self.lora else "base"
        mlp = "-mlp" if self.stream_mlp is StreamMLP.ADAPTER else ""
        return f"{self.mode}{self.msa_layers}{mlp}{'-f' if self.transform else ''}{'-g' if self.token else ''}"

    @property
    def described(self) -> str:
        """A description for messages."""
        if self.mode is None:
            return "plain decoding with a LoRA" if self.lora else "plain decoding"
        mlp = f", stream_mlp {self.stream_mlp}" if self.stream_mlp is StreamMLP.ADAPTER else ""
        terms = f"{', f of eq. 3' if self.transform else ''}{', that see the chosen token' if self.token else ''}"
        return f"{self.mode} streams with N_s = {self.msa_layers}{mlp}{terms}"


@dataclass(frozen=True)
class SlotLayout:
    """``slots.json``: all variants of a bundle. ``hidden``: width of a stream identifier."""

    hidden: int
    variants: tuple[Variant, ...]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(f"schema_version is {self.schema_version}, this ssdevice reads {SCHEMA_VERSION}")

    def variant(self, name: str) -> Variant | None:
        """The variant with this name, or None."""
        return next((variant for variant in self.variants if variant.name == name), None)


def read_layout(file: Path) -> SlotLayout:
    """The layout in a file; raises ConfigError."""
    return load_strict(SlotLayout, read_json(file), str(file))


@dataclass(frozen=True)
class StateSlot:
    """A slot in the state of a program: ``<state>.down [1, inputs, rank]`` and ``<state>.up [1, rank, outputs]``."""

    kind: SlotKind
    source: str
    state: str
    inputs: int
    outputs: int
    rank: int

    def __post_init__(self) -> None:
        if min(self.inputs, self.outputs, self.rank) < 1:
            raise ConfigError(f"slot {self.source!r}: {self.inputs} x {self.rank} x {self.outputs}: all are 1 or more")


@dataclass(frozen=True)
class ProgramLayout:
    """``slots.json`` of a bundle whose apps share one program. ``variant``: that of the apps with streams.

    ``identifiers``: name of the state with the stream identifiers ``[γ, hidden]``, empty without streams.
    """

    hidden: int
    variant: Variant
    slots: tuple[StateSlot, ...]
    identifiers: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(f"schema_version is {self.schema_version}, this ssdevice reads {SCHEMA_VERSION}")

    def takes(self, wanted: Variant) -> bool:
        """Whether an app of this variant runs: as the program's own, or as a LoRA without streams in the same slots."""
        return wanted.name in (self.variant.name, "lora" if self.variant.lora else "")


def read_program_layout(file: Path) -> ProgramLayout:
    """The layout in a file; raises ConfigError."""
    return load_strict(ProgramLayout, read_json(file), str(file))
