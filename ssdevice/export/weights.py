"""Every weight of a model that a target stores: what it is, and how it is stored.

One walk over the model makes a ``Stored`` of each; whoever writes, reads, rounds or compares
weights reads this table. A new kind of weight is a ``Kind`` here and, where a target can store it
in fewer bits than floats have, a row of the target's ``Schemes``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeGuard

from torch import Tensor, nn

from ssdevice.adapters.slots import SlotKind
from ssdevice.export.calibration.grid import Grid, Rounded
from ssdevice.model.lora import LoraLinear
from ssdevice.model.mapped import release
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import LowRank, StreamRowAdapter


class Part(StrEnum):
    """The part of the model that a weight belongs to.

    A head that is tied to the embedding counts as the embedding. DRAFT: of layers of their own that
    draft, and what makes their state. FACTOR: of a low-rank term; OWN_FACTOR: of one of the streams
    themselves (see ``Streams.own_terms``). LINEAR: any other linear.
    """

    EMBEDDING = "embedding"
    HEAD = "head"
    DRAFT_HEAD = "draft head"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OUTPUT = "output"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    LINEAR = "linear"
    DRAFT = "draft layer"
    FACTOR = "factor"
    OWN_FACTOR = "own factor"


NAMES = {
    "q_proj": Part.QUERY,
    "k_proj": Part.KEY,
    "v_proj": Part.VALUE,
    "o_proj": Part.OUTPUT,
    "out_proj": Part.OUTPUT,
    "gate_proj": Part.GATE,
    "up_proj": Part.UP,
    "fc1": Part.UP,
    "down_proj": Part.DOWN,
    "fc2": Part.DOWN,
}
"""The parts of linears by the names that families give them in their layers."""
WRAPPED = ("base", "folded")
"""Names of a linear inside what adds a low-rank term to it."""
OTHER = "other"
"""The part of weights whose kind names none."""


@dataclass(frozen=True)
class Role:
    """What a weight is: its ``part``, a Part or what its kind says.

    For a factor of a low-rank term: its ``kind``, the term's name in the adapter folder
    (``source``), and whether it is the second factor (``up``).
    """

    part: str
    kind: SlotKind = SlotKind.LORA
    source: str = ""
    up: bool = False

    @property
    def factor(self) -> bool:
        """Whether it is a factor of a low-rank term."""
        return self.part in (Part.FACTOR, Part.OWN_FACTOR)


@dataclass(frozen=True)
class Kind:
    """Modules of a class whose ``tensors``, named by their attributes, are weights ``[.., outputs,
    inputs]``.

    ``product``: its only tensor is a matrix that its forward multiplies every row with, as a
    linear's does. ``part``: of its weights; None: by the module's place in the model.
    """

    module: type[nn.Module]
    tensors: tuple[str, ...] = ("weight",)
    product: bool = False
    part: str | None = None


KINDS = (Kind(nn.Linear, product=True), Kind(nn.Embedding, part=OTHER))
"""Every kind of module that holds weights; the first that fits counts."""


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a module that holds weights; None for norms, containers and activations."""
    for kind in KINDS:
        if isinstance(module, kind.module):
            return kind
    return None


def multiplies(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a product of every row with one matrix."""
    kind = kind_of(module)
    return kind is not None and kind.product


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored: the ``name`` in notes, and bits of a number.

    ``rounds``: what the product itself makes of ``[N, inputs]``; None: floats, or a library rounds.
    ``grid``: where that puts weights, so that calibration can choose among its values; None: they
    are never calibrated.
    """

    name: str
    bits: int
    rounds: Callable[[Tensor], Rounded] | None = None
    grid: Grid | None = None

    @classmethod
    def on(cls, name: str, bits: int, grid: Grid) -> "Scheme":
        """A scheme that rounds to nearest on a grid."""
        return cls(name, bits, grid.rounded, grid)

    @property
    def floats(self) -> bool:
        """Whether numbers stay floats."""
        return self.bits >= 16


Rows = dict[str, Scheme]
"""Schemes by the part of the model."""
FLOAT32 = Scheme("float32", 32)
KEPT = Scheme("float32 in every precision", 32)
UNLISTED = Scheme("floats, for want of a row in the target's table", 32)


@dataclass(frozen=True)
class Schemes:
    """A target's table in one precision: the only place where a weight's precision is decided.

    ``usual``: of every product without a row of its own in ``by_part``; weights of other kinds
    without one stay floats, which a note says (``floats_note``). ``least``: weights of fewer
    elements are ``kept`` as they are. ``uneven``: instead of
    ``usual`` where its blocks do not divide the inputs. ``slot``: of first factors that a slot
    holds beside a rounded weight; other factors in slots are ``kept``.
    """

    usual: Scheme
    by_part: Mapping[str, Scheme] = field(default_factory=dict)
    kept: Scheme = KEPT
    least: int = 0
    uneven: Scheme | None = None
    slot: Scheme | None = None

    def of(self, role: Role, weight: Tensor, product: bool = True) -> tuple[Scheme, bool]:
        """The scheme of a weight, and whether that is ``uneven``; ``product``: its kind is one."""
        if weight.numel() < self.least:
            return self.kept, False
        others = self.kept if self.usual.floats else UNLISTED
        chosen = self.by_part.get(role.part, self.usual if product else others)
        block = chosen.grid.block if chosen.grid is not None else None
        if self.uneven is not None and block is not None and weight.shape[-1] % block:
            return self.uneven, True
        return chosen, False

    def in_slot(self, base: "Stored | None") -> Scheme:
        """The scheme of a factor in a slot; ``base``: the weight beside a first one."""
        if self.slot is None or base is None or base.scheme.floats:
            return self.kept
        return self.slot


@dataclass(frozen=True, eq=False)
class Stored:
    """A weight of a model: all ``names`` of its parameter, and all modules that hold it.

    ``uneven``: its scheme is another than its role's, because of the number of its inputs.
    ``product``: its modules multiply every row with it.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    weight: Tensor
    role: Role
    scheme: Scheme
    product: bool = True
    uneven: bool = False

    @property
    def module(self) -> nn.Module:
        """The first module that holds it."""
        return self.modules[0]

    @property
    def owner(self) -> str:
        """The name of its first module."""
        return self.names[0].rpartition(".")[0]

    def round(self) -> Rounded:
        """Its codes and scales, where no library makes them."""
        assert self.scheme.rounds is not None
        made = self.scheme.rounds(self.weight.detach().float())
        release()
        return made

    @cached_property
    def rounded(self) -> Rounded:
        """Its codes and scales, computed when they are first asked for and kept."""
        return self.round()


def stored(model: nn.Module, schemes: Schemes, slotted: bool = False) -> list[Stored]:
    """The table of a model: each of its weights once, in the order of its modules.

    ``slotted``: low-rank terms beside linears are in slots.
    """
    held: dict[int, _Held] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kind = kind_of(module)
        if kind is None:
            continue
        for attribute in kind.tensors:
            weight: Tensor = getattr(module, attribute)
            one = held.setdefault(id(weight), _Held(weight))
            one.names.append(f"{path}.{attribute}" if path else attribute)
            one.modules[module] = None
            one.kinds.append(kind)
    roles = _roles(model)
    table: dict[int, Stored] = {}
    for key, one in held.items():
        product = any(kind.product for kind in one.kinds)
        role = roles.get(key) or Role(one.kinds[0].part or _part_of(one.names[0]))
        scheme, uneven = schemes.of(role, one.weight, product)
        table[key] = Stored(
            tuple(one.names), tuple(one.modules), one.weight, role, scheme, product, uneven
        )
    if slotted:
        bases = _bases(model)
        for key, factor in table.items():
            if factor.role.factor:
                base = table.get(bases.get(key, 0))
                table[key] = replace(factor, scheme=schemes.in_slot(base))
    return [*table.values()]


@dataclass
class _Held:
    """A parameter, and where the walk found it."""

    weight: Tensor
    names: list[str] = field(default_factory=list)
    modules: dict[nn.Module, None] = field(default_factory=dict)
    kinds: list[Kind] = field(default_factory=list)


def by_name(form: nn.Module, table: Iterable[Stored]) -> dict[str, Stored]:
    """The weights of a table by their names in a module that holds them, which its traced programs
    keep.
    """
    known = {id(one.weight): one for one in table}
    names = form.named_parameters(remove_duplicate=False)
    return {name: known[id(tensor)] for name, tensor in names if id(tensor) in known}


def low_rank_terms(model: StreamModel) -> dict[LowRank, tuple[SlotKind, str]]:
    """Every low-rank term of an app with its kind and its name in the adapter folder."""
    path = model.backbone.family.layers_path
    found = {}
    for name, part in model.backbone.layers.named_modules():
        if isinstance(part, LoraLinear) and isinstance(part.adapter, LowRank):  # no slot yet
            found[part.adapter] = SlotKind.LORA, f"{path}.{name}"
    for name, part in model.streams.named_modules() if model.streams is not None else ():
        if isinstance(part, LowRank):
            found[part] = SlotKind.STREAM, name
    return found


def _roles(model: nn.Module) -> dict[int, Role]:
    """The roles of weights other than linears of the layers, by the parameters' identities."""
    found: dict[int, Role] = {}
    for part in model.modules():
        if isinstance(part, LowRank):
            found[id(part.down.weight)] = Role(Part.FACTOR)
            found[id(part.up.weight)] = Role(Part.FACTOR, up=True)
    whole = next((part for part in model.modules() if isinstance(part, StreamModel)), None)
    if whole is None:
        return found
    ends = (
        (Part.HEAD, whole.backbone.lm_head),
        (Part.DRAFT_HEAD, whole.draft_head),
        (Part.EMBEDDING, whole.backbone.embed_tokens),  # after the heads, which may be tied to it
        (Part.DRAFT, whole.own),
    )
    for name, module in ends:
        for parameter in module.parameters() if module is not None else ():
            found[id(parameter)] = Role(name)
    alone = whole.streams.own_terms() if whole.streams is not None else []
    for term, (kind, source) in low_rank_terms(whole).items():
        name = Part.OWN_FACTOR if term in alone else Part.FACTOR
        found[id(term.down.weight)] = Role(name, kind, source)
        found[id(term.up.weight)] = Role(name, kind, source, up=True)
    return found


def _part_of(name: str) -> str:
    """The part of a linear by its parameter's name."""
    *_, owner, leaf, _ = ["", "", *name.split(".")]
    return NAMES.get(owner if leaf in WRAPPED else leaf, Part.LINEAR)


def _bases(model: nn.Module) -> dict[int, int]:
    """The first factor of each term beside a linear -> the linear's weight, by their identities."""
    found = {}
    for part in model.modules():
        if not isinstance(part, (LoraLinear, StreamRowAdapter)):
            continue
        if multiplies(part.base) and isinstance(part.adapter, LowRank):
            found[id(part.adapter.down.weight)] = id(part.base.weight)
    return found


def unlisted(table: Iterable[Stored]) -> dict[str, int]:
    """The names and sizes of weights that stay floats for want of a row in a target's table."""
    return {one.names[0]: one.weight.numel() for one in table if one.scheme is UNLISTED}


def floats_note(kept: Mapping[str, int]) -> tuple[str, ...]:
    """The note of a bundle in which some weights stay floats, given their names and sizes."""
    if not kept:
        return ()
    names = ", ".join(sorted(kept)[:3]) + (", .." if len(kept) > 3 else "")
    return (f"{len(kept)} weights ({sum(kept.values())} elements) stay floats: {names}",)
