"""How the matrices of a Core AI asset are stored.

Activations and products are float32 in every precision.

In float16 the runtime for CPUs also adds in float16, which no reference can follow
(docs/coreai.md); and only weights are rounded, so no row can see another through a scale. A matrix
is a parametrization of its linear or embedding: the module's ``weight`` is computed from what is
stored, by the operators that coreai-torch stores compressed weights with. What is stored is a
tuple, also if it is one tensor, which torch would not let change its type.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ssdevice.export import weights
from ssdevice.export.calibration.grid import Grid, symmetric
from ssdevice.export.plan import INT8_HEAD, Quant
from ssdevice.export.weights import FLOAT32, KEPT, Part, Rows, Scheme, Schemes, Stored
from ssdevice.model.step import StreamModel

GROUP = 32
"""Inputs that share a scale in 4 bits."""
TURNED = Scheme("float32, turned", 32)
HALF = Scheme("float16", 16)
EIGHT = Grid(None, symmetric, -127, 127)
INT8 = Scheme("int8", 8, EIGHT.rounded)
INT4 = Scheme.on("int4", 4, Grid(GROUP, symmetric, -7, 7))
DTYPES = {8: torch.int8, 4: torch.int4}  # type: ignore[attr-defined]


class Turned(nn.Module):
    """A float32 matrix as the right operand of a product.

    The runtime would turn it in every call.
    """

    def right_inverse(self, weight: Tensor) -> tuple[Tensor]:
        """``[outputs, inputs] -> [inputs, outputs]``."""
        return (weight.detach().T.contiguous(),)

    def forward(self, stored: Tensor) -> Tensor:
        return stored.T


class Halves(nn.Module):
    """A matrix in float16, without subnormal numbers: the runtime takes them for zeros."""

    def right_inverse(self, weight: Tensor) -> tuple[Tensor]:
        halves = weight.detach().half()
        least = torch.finfo(torch.float16).tiny
        return (torch.where(halves.abs() < least, torch.round(halves / least) * least, halves),)

    def forward(self, stored: Tensor) -> Tensor:
        return stored.float()


class Integers(nn.Module):
    """A matrix in integers, as its ``scheme`` rounds it."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Integers ``[outputs, inputs]`` in int8, and scales ``[outputs, groups]``."""
        assert self.scheme.rounds is not None
        made = self.scheme.rounds(weight.detach())
        return made.codes.reshape(weight.shape), made.scale

    def forward(self, codes: Tensor, scale: Tensor) -> Tensor:
        form = DTYPES[self.scheme.bits]
        dense: Tensor = torch.ops.coreai.constexpr_blockwise_shift_scale(
            codes, scale, None, None, form, None
        )
        return dense


@contextmanager
def stored(model: StreamModel, quant: Quant, values: bool = False) -> Iterator[tuple[str, ...]]:
    """In this context the model's matrices are computed from what an asset stores, as a trace
    should see them.

    ``values``: they have the resulting values instead. Yields notes on deviations from the
    precision.
    """
    import coreai_torch._compression.custom_layers  # noqa: F401  defines the operator

    table = weights.stored(model, schemes(quant))
    forms = {part: _form(one.scheme) for one in table for part in one.modules}
    parts = {part: form for part, form in forms.items() if form is not None}
    before = {part: cast(Tensor, part.weight) for part in parts}
    for part, form in parts.items():
        # Integers have no gradients.
        part.weight = nn.Parameter(before[part].detach(), requires_grad=False)
        parametrize.register_parametrization(part, "weight", form, unsafe=True)
        if values:
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
    try:
        yield _notes(table, quant)
    finally:
        for part, weight in before.items():
            if not values:
                parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
            del part.weight
            part.weight = weight


def schemes(quant: Quant) -> Schemes:
    """The table of this target. Low-rank factors stay float32: they are small."""
    factors: Rows = {Part.FACTOR: KEPT, Part.OWN_FACTOR: KEPT}
    if quant is Quant.FP32:
        return Schemes(TURNED, {**factors, Part.EMBEDDING: FLOAT32})
    if quant is Quant.FP16:
        return Schemes(HALF, {**factors, Part.EMBEDDING: HALF})
    ends: Rows = {Part.EMBEDDING: INT8, Part.HEAD: INT8, Part.DRAFT_HEAD: INT8}
    return Schemes(INT8 if quant is Quant.INT8 else INT4, {**factors, **ends}, uneven=INT8)


def _form(scheme: Scheme) -> nn.Module | None:
    """How a matrix is computed from what is stored; None: it is stored as it is."""
    if scheme is TURNED:
        return Turned()
    if scheme is HALF:
        return Halves()
    return None if scheme.floats else Integers(scheme)


def _notes(table: Sequence[Stored], quant: Quant) -> tuple[str, ...]:
    uneven = (
        f"{one.owner} has {one.weight.shape[1]} inputs, not a multiple of {GROUP}: int8, not int4"
        for one in table
        if one.uneven
    )
    ends = (INT8_HEAD,) if quant is Quant.INT4 else ()
    return (*uneven, *ends, *weights.floats_note(weights.unlisted(table)))
