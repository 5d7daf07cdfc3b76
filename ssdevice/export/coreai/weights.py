"""How the matrices of a Core AI asset are stored.

Activations and products are float32 in every precision.

In float16 the runtime for CPUs also adds in float16, which no reference can follow
(docs/coreai.md); and only weights are rounded, so no row can see another through a scale. A matrix
is a parametrization of its linear or embedding: the module's ``weight`` is computed from what is
stored, by the operators that coreai-torch stores compressed weights with. What is stored is a
tuple, also if it is one tensor, which torch would not let change its type.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ssdevice.export.calibration.grid import Grid, symmetric
from ssdevice.export.plan import INT8_HEAD, Quant
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import low_rank_factors

GROUP = 32
"""Inputs that share a scale in 4 bits."""
INT4_GRID = Grid(GROUP, symmetric, -7, 7)
"""What ``Integers`` rounds to in 4 bits."""
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
    """A matrix in integers of ``bits``; a scale belongs to ``group`` inputs of an output, or to all
    (None).
    """

    def __init__(self, bits: int, group: int | None) -> None:
        super().__init__()
        self.bits = bits
        self.group = group

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Integers ``[outputs, inputs]`` in int8, and scales ``[outputs, groups]``."""
        outputs, inputs = weight.shape
        groups = weight.detach().reshape(outputs, -1, self.group or inputs)
        largest = 2 ** (self.bits - 1) - 1
        scale = groups.abs().amax(-1) / largest
        scale = torch.where(scale > 0, scale, 1.0)
        codes = torch.round(groups / scale[..., None]).clamp(-largest, largest)
        return codes.to(torch.int8).reshape(outputs, inputs), scale

    def forward(self, codes: Tensor, scale: Tensor) -> Tensor:
        form = DTYPES[self.bits]
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

    forms, notes = _forms(model, quant)
    before = {part: part.weight for part in forms}
    for part, form in forms.items():
        part.weight = nn.Parameter(
            before[part].detach(), requires_grad=False
        )  # integers have no gradients
        parametrize.register_parametrization(part, "weight", form, unsafe=True)
        if values:
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
    try:
        yield notes
    finally:
        for part, weight in before.items():
            if not values:
                parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
            del part.weight
            part.weight = weight


def _forms(
    model: StreamModel, quant: Quant
) -> tuple[dict[nn.Linear | nn.Embedding, nn.Module], tuple[str, ...]]:
    """How each matrix is stored, and notes. Low-rank factors stay float32: they are small."""
    embedding = model.backbone.embed_tokens
    notes = []
    low_rank = low_rank_factors(model)
    whole = (model.backbone.lm_head, model.draft_head, embedding)
    forms: dict[nn.Linear | nn.Embedding, nn.Module] = {}
    for name, part in model.named_modules():
        if not isinstance(part, (nn.Linear, nn.Embedding)) or part in low_rank:
            continue
        if quant is Quant.FP32:
            if isinstance(part, nn.Linear) and part.weight is not embedding.weight:
                forms[part] = Turned()
        elif quant is Quant.FP16:
            forms[part] = Halves()
        else:
            eight = quant is Quant.INT8 or part in whole
            uneven = part.weight.shape[1] % GROUP > 0
            forms[part] = Integers(8, None) if eight or uneven else Integers(4, GROUP)
            if uneven and not eight:
                notes.append(
                    f"{name} has {part.weight.shape[1]} inputs, not a multiple of {GROUP}: int8, not int4"
                )
    if quant is Quant.INT4:
        notes.append(INT8_HEAD)
    return forms, tuple(notes)
