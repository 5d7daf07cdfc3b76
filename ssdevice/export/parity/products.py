"""Checks every product of an artifact with the rows that the artifact itself gave it.

Rounding differences grow with depth: a value at a rounding edge falls to the other side, the next
layer sees another input, and after thirty layers a correct export differs from its reference as
much as quantization differs from float. No bound on final results tells such an export from a wrong
one. So the reference does not run independently of the artifact, it *follows* it. Wherever the
model multiplies rows with a matrix,

1. the rows that the artifact's product reads must be those of the reference: between two products
   there are only
   norms, rotary embeddings, attention and sums, in floats, so the bound is that of float rounding;
2. the artifact's result must be what the reference's product, with its quantization, computes from
   **the artifact's**
   rows;
3. the reference continues with the artifact's result.

So errors do not accumulate, and the bounds are those of one operation at any depth. The logits are
products too: the tokens, counts and drafts chosen from them must be equal, and rows to commit must
agree like the rows of 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ssdevice.config import Schedule
from ssdevice.errors import ParityError
from ssdevice.export.parity.difference import (
    Array,
    difference,
    distinct,
    product_difference,
    worst_column,
)
from ssdevice.export.parity.rounding import RoundedTo, moved_by_edges
from ssdevice.export.weights import kind_of, multiplies
from ssdevice.model.lora import LoraLinear
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import LowRank, StreamRowAdapter

T = TypeVar("T")


class Product(NamedTuple):
    """``weight``: the parameter's name in the artifact; ``inputs [rows, K]``, ``outputs [rows,
    N]``.
    """

    weight: str
    inputs: Array
    outputs: Array


class Call(NamedTuple):
    """One call of a function: outputs by the contract's names (the new rows as ``ROWS``), and all
    its products.
    """

    outputs: Mapping[str, Array]
    products: Sequence[Product]


class Shown(ABC):
    """An artifact that shows its products. ``dtype``: that of its cache.

    ``slotted``: low-rank terms are graph inputs, and part of the product of their linear.
    """

    dtype: type[np.generic] = np.float32
    slotted = False

    @abstractmethod
    def call(self, function: str, inputs: Mapping[str, Array], length: int, past: Array) -> Call:
        """``inputs``: the integers, with the length; ``past``: rows ``[2 * layers, length, kv_heads
        * head_dim]``.
        """

    def spell(self, parameter: str) -> str:
        """The artifact's name of a parameter."""
        return parameter

    def close(self) -> None:  # noqa: B027  most hold nothing of their own
        """Release what calls need: there are no more."""


class Bounds(NamedTuple):
    """Allowed relative differences (rms).

    ``rows``: of a row that is read or committed. ``product``: of a product.

    ``column``: of any column in half of its rows; a wrong scale shows in every row, a rounding edge
    in one. ``bits``: rows may also differ as much as rounding every value between products to so
    many bits of significand makes them, within ``ROUNDING``.
    """

    rows: float
    product: float
    column: float
    bits: int


FLOAT32 = Bounds(rows=2e-4, product=1e-4, column=1e-4, bits=21)
"""Float rounding of one operation, a hundred times the measured differences.

Rows may differ more where rounding to 21 bits changes them more: where attention is sharp, and
where an outlier is at a rounding edge of a cache in float16.
"""
QUANTIZED = Bounds(rows=2e-4, product=0.01, column=5e-3, bits=21)
"""Between products as in float32.

Within a product one input at a rounding edge may take the next level. With an outlier of twenty
times the usual size that is 1 of its 127 levels among some hundred inputs, less than 1 %.
"""
FLOAT16 = Bounds(rows=0.01, product=2e-3, column=2e-3, bits=11)
"""Every operation rounds to 11 bits.

If a model adds a huge value to a channel and subtracts it many layers later, as SmolLM2 does,
little remains of that row but the rounding of all sums in between.
"""
ROUNDING = 3.0
"""An artifact rounds a few times more than the reference's operations, in its norms for example."""


WRONG_PRODUCT = (
    "Its stored weights or scales are not the model's, or this CPU's kernel computes something "
    "else (integer products that saturate): try another --quant"
)
"""Ends the message about a product that differs."""


class RowsDifferError(ParityError):
    """A product reads other rows than the model's."""


@dataclass
class Follower:
    """Compares the reference's linears with an artifact's calls.

    ``worst_*`` and ``count``: over all calls.
    """

    model: StreamModel
    shown: Shown
    bounds: Bounds
    schedule: Schedule
    worst_rows: float = 0.0
    worst_product: float = 0.0
    count: int = 0
    where: str = ""
    _rounding: bool = False
    _paused: bool = False
    _rounded: list[Array] = field(default_factory=list)
    _waiting: dict[int, list[Product]] = field(default_factory=dict)
    _unused: set[nn.Module] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.names = followed(self.model, self.shown.slotted, self.schedule)
        self.by_weight = {
            self.shown.spell(f"{name}.weight"): id(module)
            for module, names in self.names.items()
            for name in names
        }

    def follow(self, where: str, call: Call, run: Callable[[], T]) -> T:
        """What ``run`` of the reference gives while the model's linears compare themselves with a
        call's products.

        What rounding may change is only computed where rows differ by more than their bound.
        """
        self.where = where
        self._rounded = []
        before = self.worst_rows, self.worst_product, self.count
        try:
            with self._following(call, rounding=False):
                return run()
        except RowsDifferError:
            self.worst_rows, self.worst_product, self.count = before
            with RoundedTo(self.bounds.bits), self._following(call, rounding=True):
                run()
        with self._following(call, rounding=False):
            return run()

    @contextmanager
    def _following(self, call: Call, rounding: bool) -> Iterator[None]:
        """The model's linears return the call's results; with ``rounding`` they only record what
        they read.
        """
        self._waiting = {}
        self._rounding = rounding
        for product in call.products:
            if product.weight in self.by_weight:
                self._waiting.setdefault(self.by_weight[product.weight], []).append(product)
        # Main rows give the last draft layer keys and values only: what else it makes of them is in
        # no artifact.
        own = (
            []
            if self.model.own is None
            else [part for part in self.model.own.layers.modules() if part in self.names]
        )
        times = {part: len(self._waiting.get(id(part), ())) for part in own}
        self._unused = {part for part in own if times[part] < max(times.values())}
        with ExitStack() as hooks:
            for module in self.names:
                hooks.enter_context(module.register_forward_pre_hook(self._before, prepend=True))
                hooks.enter_context(module.register_forward_hook(self._after))
            yield
        if left := [module for module in self.names if self._waiting.get(id(module))]:
            raise ParityError(
                f"{self.where}: {self._place(left[0])} is multiplied more often than in the model"
            )

    def _before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._paused or module in self._unused:
            return inputs
        if not (waiting := self._waiting.get(id(module))):
            raise ParityError(f"{self.where}: {self._place(module)} has no product in the artifact")
        x = inputs[0]
        mine = waiting[0].inputs
        theirs = flat(inputs[0])
        chosen = self._rows_of(module, mine, theirs)
        if self._rounding:
            self._rounded.append(theirs[chosen])
        else:
            self._compare_rows(module, mine, theirs[chosen])
        return (_with_rows(x, chosen, mine), *inputs[1:])

    def _compare_rows(self, module: nn.Module, mine: Array, theirs: Array) -> None:
        off = difference(mine, theirs)
        allowed = self.bounds.rows
        if self._rounded:
            allowed = max(allowed, ROUNDING * difference(self._rounded.pop(0), theirs))
        self.worst_rows = max(self.worst_rows, off)
        if not off <= allowed:
            raise RowsDifferError(
                f"{self.where}: {self._place(module)} reads rows that differ by {off:.2g} of their "
                f"size from the model's, allowed is {allowed:.2g}. All products before it are "
                "right, so the fault lies between them and it: a norm, rotary embedding, mask, "
                "cache row, residual or stream identifier"
            )

    def _after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if self._paused:
            return output
        if module in self._unused:
            self._unused.remove(module)
            return output
        product = self._waiting[id(module)].pop(0)
        theirs = flat(output)
        chosen = self._rows_of(module, product.inputs, flat(inputs[0]))
        if product.outputs.shape[-1] != theirs.shape[-1]:
            raise ParityError(
                f"{self.where}: {self._place(module)} has {product.outputs.shape[-1]} columns, "
                f"not {theirs.shape[-1]}"
            )
        if not self._rounding:
            x = _with_rows(
                inputs[0], chosen, product.inputs
            )  # as they were before the module quantized them
            again = partial(self._again, module, inputs[1:], chosen)
            self._compare_product(
                module, product, theirs[chosen], partial(moved_by_edges, again, x)
            )
        return _with_rows(output, chosen, product.outputs)

    def _compare_product(
        self, module: nn.Module, product: Product, theirs: Array, moved: Callable[[], Array]
    ) -> None:
        mine = product.outputs
        once = distinct(product.inputs)
        off = product_difference(mine, theirs)
        column = worst_column(mine[once], theirs[once])
        if column[1] > self.bounds.column:  # if it is a fault, edges do not explain it
            column = worst_column(mine[once], theirs[once], ROUNDING * moved()[once])
        self.worst_product, self.count = max(self.worst_product, off), self.count + 1
        if not off <= self.bounds.product:
            raise ParityError(
                f"{self.where}: {self._place(module)}: the product of its own rows differs by "
                f"{off:.2g}, allowed is {self.bounds.product:g}. {WRONG_PRODUCT}"
            )
        if not column[1] <= self.bounds.column:
            raise ParityError(
                f"{self.where}: {self._place(module)}: the product of its own rows differs in "
                f"column {column[0]} by {column[1]:.2g}, allowed is {self.bounds.column:g}. "
                f"{WRONG_PRODUCT}"
            )

    def _again(
        self, module: nn.Module, others: tuple[Tensor, ...], chosen: Array, x: Tensor
    ) -> Array:
        """The chosen rows of the reference's product for ``x``, which no artifact has."""
        self._paused = True
        try:
            return flat(module(x, *others))[chosen]
        finally:
            self._paused = False

    def _rows_of(self, module: nn.Module, mine: Array, theirs: Array) -> Array:
        """Which of the reference's rows an artifact computes: all, or the few read later."""
        if mine.shape[-1] != theirs.shape[-1] or not np.isfinite(mine).all():
            raise ParityError(
                f"{self.where}: {self._place(module)} reads rows of shape {mine.shape} or not "
                "finite"
            )
        if len(mine) == len(theirs):
            return np.arange(len(theirs))
        return np.asarray(np.square(mine[:, None] - theirs[None]).sum(axis=-1).argmin(axis=1))

    def _place(self, module: nn.Module) -> str:
        """``layer 17, self_attn.q_proj``."""
        spelled = [name.split(".") for name in self.names[module]]
        parts = next(
            (parts for parts in spelled if "layers" in parts), spelled[0]
        )  # adapters have two names
        if "layers" in parts:
            at = parts.index("layers")
            return f"layer {parts[at + 1]}, {'.'.join(parts[at + 2 :]).removesuffix('.base')}"
        return parts[-1]


def flat(x: Tensor) -> Array:
    """``[.., K]`` as ``[rows, K]`` float32."""
    return x.detach().reshape(-1, x.shape[-1]).float().numpy()


def _with_rows(x: Tensor, chosen: Array, rows: Array) -> Tensor:
    """``x`` with some of its rows replaced."""
    given = flat(x).copy()
    given[chosen] = rows
    return torch.from_numpy(given).reshape(x.shape).to(x.dtype)


def followed(model: StreamModel, slotted: bool, schedule: Schedule) -> dict[nn.Module, list[str]]:
    """Each module that is one product in an artifact -> the names of its weight's owners."""
    owners: dict[int, list[str]] = {}
    linears: dict[int, nn.Module] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        kind = kind_of(part)
        if multiplies(part):
            linears[id(part)] = part
            owners.setdefault(id(part.weight), []).insert(0, name)
        elif kind is not None:  # a tied head also has the table's name
            for attribute in kind.tensors:
                owners.setdefault(id(getattr(part, attribute)), []).append(name)
    alike = {key: owners[id(part.weight)] for key, part in linears.items()}
    names = {key: [*own, *map(_elsewhere, own)] for key, own in alike.items()}
    if slotted:
        for part in model.modules():
            if isinstance(part, LowRank):
                for factor in part.children():
                    linears.pop(id(factor), None)
            # Fused streams add their terms to some rows only, which is not one product.
            beside = (
                isinstance(part, StreamRowAdapter)
                and not part.replace
                and schedule is Schedule.DEFERRED
            )
            if (isinstance(part, LoraLinear) or beside) and id(part.base) in linears:
                linears[id(part.base)] = part
    return {module: names[key] for key, module in linears.items()}


def _elsewhere(name: str) -> str:
    """The name of a linear in a model that has streams beside it, if this one has none, or the
    other way round.

    Plain decoding of a lossless app is the base's, and both have the function that was traced for
    one of them.
    """
    return name.removesuffix(".base") if name.endswith(".base") else f"{name}.base"
