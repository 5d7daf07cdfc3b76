"""What one more app costs on a device that keeps one base: parameters and bytes by method, as plain arithmetic.

Every app of a shared base brings a LoRA, whichever way it is made fast. What a method adds to it is counted here from
the shape of the base alone. The formulas are those behind the last column of table 3 in the successor of 2402.11131
(which counts over the LoRA); its appendix C multiplies them by the number of apps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssdevice.errors import ConfigError


@dataclass(frozen=True)
class BaseShape:
    """The sizes of a decoder with gated MLPs: width D, MLP width F, vocabulary V, layers N, heads.

    Raises ConfigError for sizes below 1.
    """

    hidden: int
    intermediate: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "vocab", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 1 or more")

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> BaseShape:
        """The shape in a ``config.json`` of Hugging Face; raises ConfigError naming the key that is missing."""

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key, default)
            if value is None and default is not None:
                value = default
            if type(value) is not int:
                raise ConfigError(f"{where}: {key!r} is {str(value)[:40]!r}, expected a whole number")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        if hidden < 1 or heads < 1:
            raise ConfigError(f"{where}: hidden_size {hidden} and num_attention_heads {heads}, expected 1 or more")
        return cls(
            hidden=hidden,
            intermediate=size("intermediate_size"),
            vocab=size("vocab_size"),
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", max(hidden // heads, 1)),
            tied=config.get("tie_word_embeddings") is True,
        )

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's seven linears: q, k, v, o, gate, up, down."""
        d, f, q, kv = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return ((d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d))

    @property
    def layer(self) -> int:
        """Parameters of one layer's linears."""
        return sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model: embedding, layers with two norms each, last norm, head unless tied."""
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return tables + self.layers * (self.layer + 2 * self.hidden) + self.hidden

    def low_rank(self, rank: int) -> int:
        """Parameters of one layer's adapters of a rank: ``rank × (inputs + outputs)`` of every linear."""
        return rank * sum(inputs + outputs for inputs, outputs in self.linears)


class Method(ABC):
    """A way to make an app fast. ``name`` as the field calls it; ``parameters``: what an app brings beside its LoRA."""

    name: str

    @abstractmethod
    def parameters(self, base: BaseShape) -> int:
        """Parameters one app adds to its LoRA, on this base."""

    def has_lora(self) -> bool:
        """Whether an app also brings the LoRA of plain fine-tuning."""
        return True


@dataclass(frozen=True)
class Plain(Method):
    """The LoRA alone: nothing is drafted."""

    name: str = "LoRA alone"

    def parameters(self, base: BaseShape) -> int:
        """0."""
        return 0


@dataclass(frozen=True)
class Streams(Method):
    """Shared mode: ``γ·D`` stream embeddings and a pruning adapter of ``2·R·D``; the LoRA serves main rows and streams.

    With γ = 4 and R = 8 these are the paper's 8.2E4 for Llama-2-7B and 6.1E4 for Phi-3 (table 3; R: appendix N.1).
    ``pruning_rank``: 0 for adapters without it, as ``ssdevice train`` makes them.
    """

    gamma: int = 4
    pruning_rank: int = 0
    name: str = "Speculative Streaming, shared"

    def parameters(self, base: BaseShape) -> int:
        """γ·D + 2·R·D."""
        return (self.gamma + 2 * self.pruning_rank) * base.hidden


@dataclass(frozen=True)
class LosslessStreams(Method):
    """Lossless mode: ``γ·D`` and adapters of rank R on the linears of N_s layers, for stream rows (appendix H.2).

    Main rows are the base's own, so there is no LoRA.
    """

    gamma: int = 4
    msa_layers: int = 4
    rank: int = 8
    name: str = "Speculative Streaming, lossless"

    def parameters(self, base: BaseShape) -> int:
        """γ·D + N_s · R · Σ(inputs + outputs)."""
        return self.gamma * base.hidden + min(self.msa_layers, base.layers) * base.low_rank(self.rank)

    def has_lora(self) -> bool:
        """No: the base answers."""
        return False


@dataclass(frozen=True)
class Medusa(Method):
    """Medusa-1 heads: each a residual block (``D²`` weights, ``D`` biases) and a head of its own, ``D·V``.

    2401.10774, section 2.1. Four heads of one block are the setting of the successor's table 3 (appendix N.1).
    """

    heads: int = 4
    name: str = "Medusa heads"

    def parameters(self, base: BaseShape) -> int:
        """k · (D² + D + D·V)."""
        return self.heads * (base.hidden**2 + base.hidden + base.hidden * base.vocab)


@dataclass(frozen=True)
class Eagle(Method):
    """EAGLE: one decoder layer behind a linear from feature and token, ``2D -> D``; embedding and head are the base's.

    2401.15077, section 3. Norms and biases, a few times D, are left out.
    """

    name: str = "EAGLE"

    def parameters(self, base: BaseShape) -> int:
        """A layer's linears + 2·D·D."""
        return base.layer + 2 * base.hidden**2


@dataclass(frozen=True)
class DraftModel(Method):
    """A second, small model of the app's: all its parameters.

    ``shape``: None for the proportions that JackFram/llama-68m has beside Llama-2-7B (the draft model of the
    successor's Llama rows): 2 layers, 3/16 of the width, four times that in the MLP, tables of its own.
    """

    shape: BaseShape | None = None
    name: str = "draft model"

    def parameters(self, base: BaseShape) -> int:
        """Those of the draft model."""
        return (self.shape or proportioned_draft(base)).parameters


def proportioned_draft(base: BaseShape) -> BaseShape:
    """A draft model for a base as llama-68m is one for Llama-2-7B: width 768 for 4096, in multiples of 16."""
    width = max(16, base.hidden * 3 // 16 // 16 * 16)
    return BaseShape(width, 4 * width, base.vocab, layers=2, heads=1, kv_heads=1, head_dim=width)


METHODS: tuple[Method, ...] = (Plain(), Streams(), LosslessStreams(), DraftModel(), Eagle(), Medusa())

LLAMA_2_7B = BaseShape(4096, 11008, 32000, layers=32, heads=32, kv_heads=32, head_dim=128)
PHI_3_MINI = BaseShape(3072, 8192, 32064, layers=32, heads=32, kv_heads=32, head_dim=96)
KNOWN = {"llama-2-7b": LLAMA_2_7B, "phi-3-mini": PHI_3_MINI}
"""Bases of the successor's tables, to be counted without their weights."""


@dataclass(frozen=True)
class Row:
    """One method: ``extra`` bytes of an app beside its LoRA, and the app's ``per_app`` bytes, LoRA included.

    ``parameters``: the extra ones, None where files were measured. ``measured``: bytes of files, not arithmetic.
    """

    name: str
    parameters: int | None
    extra: int
    per_app: int
    measured: bool = False


@dataclass(frozen=True)
class Economics:
    """What methods cost on one base of ``base_bytes``. ``lora_rank`` and ``bits``: of what apps bring."""

    base: BaseShape
    base_bytes: int
    base_measured: bool
    lora_rank: int
    bits: int
    rows: tuple[Row, ...]

    def total(self, row: Row, apps: int) -> int:
        """Bytes on the device: the base once, and so many apps."""
        return self.base_bytes + apps * row.per_app

    def with_rows(self, rows: Sequence[Row]) -> Economics:
        """The same with rows added, such as measured ones."""
        return replace(self, rows=(*self.rows, *rows))


def compare(
    base: BaseShape,
    methods: Sequence[Method] = METHODS,
    *,
    lora_rank: int = 32,
    bits: int = 16,
    base_bytes: int | None = None,
    base_bits: int = 8,
) -> Economics:
    """Count every method on a base.

    ``lora_rank``: of the LoRA on all linears that each app has. ``bits``: of a parameter an app brings. ``base_bytes``:
    measured, else the base's parameters of ``base_bits`` (appendix C: apps in 16 bits on a base in 8).
    Raises ConfigError.
    """
    if lora_rank < 0 or bits < 1 or base_bits < 1:
        raise ConfigError(f"LoRA rank {lora_rank}, {bits} and {base_bits} bits: expected 0 or more, and 1 or more")

    def size(parameters: int, width: int) -> int:
        return -(-parameters * width // 8)

    lora = base.layers * base.low_rank(lora_rank)
    rows = []
    for method in methods:
        extra = method.parameters(base)
        rows.append(Row(method.name, extra, size(extra, bits), size(extra + lora * method.has_lora(), bits)))
    measured = base_bytes is not None
    total = base_bytes if base_bytes is not None else size(base.parameters, base_bits)
    return Economics(base, total, measured, lora_rank, bits, tuple(rows))
