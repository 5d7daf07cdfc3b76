"""The slots of a bundle's graphs: the table that an export writes and that adapters must fit.

A **slot** is a pair of tensors beside one product of the base: ``y = base(x) + (x @ down) @ up``.
Graphs take them as inputs, with a rank that every app chooses; a program has them as state of one
rank, filled up with zeros. Linears that read the same input may share a slot: their ``down`` are
concatenated into one product, each keeps its own ``up`` (one block-diagonal ``up`` was slower from
rank 32 on). A **variant** is a set of graphs for one kind of app; all variants read the same
weights of the base.
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

    ``sources``: the linears' names in the adapter folder, empty for one without factors;
    ``outputs``: of each. ``int8``: ``down`` has one scale per column. ``state``, ``rank``: of a
    slot that is a program's state, with tensors ``<state>.down [1, inputs, rank]`` and ``<state>.up
    [1, rank, outputs]``.
    """

    kind: SlotKind
    sources: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    int8: bool = False
    state: str = ""
    rank: int = 0

    def __post_init__(self) -> None:
        sizes = (self.inputs, *self.outputs, *((self.rank,) if self.state else ()))
        if not self.outputs or len(self.sources) != len(self.outputs) or min(sizes) < 1:
            raise ConfigError(f"slot {self.sources}: one size for each, all 1 or more, not {sizes}")

    @property
    def name(self) -> str:
        """The prefix of its tensors' names."""
        if self.state:
            return self.state
        first, *others = filter(None, self.sources)
        return "|".join(
            [
                f"{self.kind}.{first}",
                *(other.replace("-", ".").rpartition(".")[2] for other in others),
            ]
        )

    @property
    def down(self) -> TensorSpec:
        """``[inputs, rank]``, where rank is the sum over all linears."""
        return TensorSpec(
            f"{self.name}.down", (self.inputs, self._rank), "int8" if self.int8 else "float32"
        )

    @property
    def down_scale(self) -> TensorSpec:
        """``[rank]``, the scales of an int8 ``down``."""
        return TensorSpec(f"{self.name}.down_scale", (self._rank,), "float32")

    @property
    def ranks(self) -> TensorSpec:
        """``[linears]``: the number of columns of ``down`` that belong to each linear; only with
        several.
        """
        return TensorSpec(f"{self.name}.ranks", (len(self.outputs),), "int64")

    @property
    def ups(self) -> tuple[TensorSpec, ...]:
        """``[rank of the linear, its outputs]`` by linear."""
        if len(self.outputs) == 1:
            return (TensorSpec(f"{self.name}.up", (self._rank, *self.outputs), "float32"),)
        each = enumerate(self.outputs)
        return tuple(
            TensorSpec(f"{self.name}.up.{i}", (f"{self._rank}.{i}", size), "float32")
            for i, size in each
        )

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        scale = (self.down_scale,) if self.int8 else ()
        ranks = (self.ranks,) if len(self.outputs) > 1 else ()
        return (self.down, *scale, *ranks, *self.ups)

    @property
    def _rank(self) -> str:
        return f"{self.name}.rank"


@dataclass(frozen=True)
class Variant:
    """Graphs for one kind of app: with streams, with a LoRA on main rows, or neither.

    ``streams``: their kind, with one stream, and ``EXAMPLE_RANK`` for every rank that apps choose.
    ``functions``: the contract's name -> the target's (a file, or a name in a program).
    ``identifiers``: name of the tensor for the stream identifiers ``[γ, hidden]``; empty without
    one.
    """

    lora: bool
    streams: StreamConfig | None = None
    functions: dict[str, str] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    identifiers: str = ""

    @classmethod
    def of(cls, streams: StreamConfig | None, has_lora: bool) -> Self:
        """The variant that an app needs, without graphs."""
        if streams is None:
            return cls(has_lora)
        for option, value, what in (
            (
                "--draft-vocabulary",
                streams.draft_vocabulary,
                f"that choose among {streams.draft_vocabulary} tokens",
            ),
            ("--follow-rank", streams.follow_rank, "whose drafts follow each other (follow_rank)"),
            ("--draft-layers", streams.draft_layers, "of draft layers"),
        ):
            if value:
                shared = f"streams {what} cannot share a bundle with other apps yet"
                raise InputError(
                    f"{shared}: export this app by itself, or train it with {option} 0"
                )
        lossless = streams.mode is Mode.LOSSLESS
        f, g = (rank and EXAMPLE_RANK for rank in (streams.init_rank, streams.token_rank))
        mlp = streams.stream_mlp if lossless else StreamMLP.BASE_ADAPTER
        kind = replace(
            streams, gamma=1, init_rank=f, token_rank=g, adapter_rank=EXAMPLE_RANK, lora_rank=0
        )
        return cls(not lossless, replace(kind, stream_mlp=mlp))

    def own(self, names: Iterable[str]) -> list[str]:
        """The contract's functions among ``names`` that its apps have."""
        return [name for name in names if self.streams is not None or name in (PREFILL, *ONE_ROW)]

    @property
    def name(self) -> str:
        if self.streams is None:
            return "lora" if self.lora else "base"
        s = self.streams
        mlp = {StreamMLP.ADAPTER: "-mlp", StreamMLP.ADAPTER_ONLY: "-only"}.get(s.stream_mlp, "")
        return f"{s.mode}{s.msa_layers}{mlp}{'-f' if s.init_rank else ''}{'-g' if s.token_rank else ''}"

    @property
    def described(self) -> str:
        if self.streams is None:
            return "plain decoding with a LoRA" if self.lora else "plain decoding"
        s = self.streams
        mlp = f", stream_mlp {s.stream_mlp}" if s.stream_mlp is not StreamMLP.BASE_ADAPTER else ""
        terms = f"{', f of eq. 3' if s.init_rank else ''}{', that see the chosen token' if s.token_rank else ''}"
        return f"{s.mode} streams with N_s = {s.msa_layers}{mlp}{terms}"


@dataclass(frozen=True)
class SlotLayout:
    """``slots.json``: all variants of a bundle. ``hidden``: width of a stream identifier."""

    hidden: int
    variants: tuple[Variant, ...]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            what = f"schema_version is {self.schema_version}, expected {SCHEMA_VERSION}"
            raise ConfigError(f"{what}: export the bundle again")

    def variant(self, name: str) -> Variant | None:
        return next((variant for variant in self.variants if variant.name == name), None)


def read_layout(file: Path) -> SlotLayout:
    return load_strict(SlotLayout, read_json(file), str(file))
