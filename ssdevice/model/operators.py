"""Explicit hooks for what a target computes in its own way.

They are attention, rotary embedding, norms, the choice of tokens, and masks. A form
(``ssdevice.export.forms``) is built from a model under its target's operators. The Hugging Face
classes, their modules and the model itself stay unchanged: ``under`` returns a second set of module
objects over the same weights.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ssdevice.model.attention import MASKED, Attention, attend

if TYPE_CHECKING:
    from ssdevice.model.backbone import Backbone
    from ssdevice.model.step import StreamModel

ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""The name of the rotary embedding in every Hugging Face family; attention calls it only by this
name.
"""
Apply = Callable[..., tuple[Tensor, Tensor]]
"""A family's own function: ``(q, k, cos, sin)`` -> q and k rotated."""
Rotary = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""``rotary(x [1, heads, R, hd], cos [1, R, hd], sin [1, R, hd], interleaved)``: see ``rotate``."""


def argmax(scores: Tensor) -> Tensor:
    """Index of the largest value in the last dimension as int32; the lowest index wins a tie."""
    return torch.argmax(scores, dim=-1).to(torch.int32)


def top_k(scores: Tensor, k: int) -> Tensor:
    """The k largest of ``[R, V]`` as ids ``[R, k]``, best first; the lowest id wins a tie.

    It takes k rounds of argmax, because torch's topk does not define the order of ties, and some
    targets turn it into a sort.
    """
    ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    taken: list[Tensor] = []
    for _ in range(k):
        best = argmax(scores)[:, None]
        taken.append(best)
        scores = torch.where(ids[None] == best, torch.finfo(scores.dtype).min, scores)
    return torch.cat(taken, dim=1)


@dataclass(frozen=True)
class Operators:
    """The hooks; by default all is computed as in the Hugging Face layers.

    - ``attention``: see ``ssdevice.model.attention``.
    - ``rotary``: replaces a family's own function if both compute the same.
    - ``norm``: returns the replacement of a module of the layers, None to keep it.
    - ``top_k``: see the function of that name.
    - ``mask_value``: additive mask of an invisible row.
    """

    attention: Attention = attend
    rotary: Rotary | None = None
    norm: Callable[[nn.Module], nn.Module | None] | None = None
    top_k: Callable[[Tensor, int], Tensor] = top_k
    mask_value: float = MASKED


def under(model: "StreamModel", operators: Operators) -> "StreamModel":
    """The same model under other operators: new modules that share the tensors of ``model``."""
    # What deepcopy finds in its memo it does not copy.
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    shared[id(model.backbone.config)] = model.backbone.config
    made = copy.deepcopy(model, shared)
    made.backbone.operators = operators
    if operators.norm is not None:
        for parent in list(made.modules()):
            for name, child in list(parent.named_children()):
                replacement = operators.norm(child)
                if replacement is not None:
                    setattr(parent, name, replacement)
    if operators.rotary is not None:
        _hook_rotary(made.backbone, operators.rotary)
    return made


@dataclass(frozen=True)
class NormKind:
    """A norm over the last dimension: ``x / sqrt(mean(x²) + eps) * scale``.

    ``centered``: the mean is subtracted from x first.
    """

    scale: nn.Parameter
    eps: float
    centered: bool

    def __call__(self, x: Tensor) -> Tensor:
        row = x - x.mean(-1, keepdim=True) if self.centered else x
        return row * torch.rsqrt((row * row).mean(-1, keepdim=True) + self.eps) * self.scale


def norm_kind(module: nn.Module) -> NormKind | None:
    """What a family's norm computes; None for other modules, and for ``torch.nn.LayerNorm``.

    Candidates are tried on numbers: families differ in the name of eps, in whether the weight is
    added to one, and in whether the mean is subtracted.
    """
    weights = dict(module.named_parameters())
    if isinstance(module, (nn.LayerNorm, nn.Linear, nn.Embedding)) or list(weights) != ["weight"]:
        return None
    weight = weights["weight"]
    eps = 0.0
    for name in ("eps", "variance_epsilon"):
        eps = float(getattr(module, name, eps))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-4, 1e-2, 1.0, 30.0, 500.0]).reshape(5, *[1] * weight.dim())
    probe = torch.randn(5, *weight.shape, generator=generator) * sizes
    with torch.no_grad():
        expected = module(probe)
        scales = (weight, nn.Parameter(1.0 + weight, requires_grad=False))
        for scale, centered in product(scales, (False, True)):
            kind = NormKind(scale, eps, centered)
            if torch.allclose(kind(probe), expected, rtol=1e-4, atol=1e-5):
                return kind
    return None


def _hook_rotary(backbone: "Backbone", rotary: Rotary) -> None:
    """Make attention modules call ``rotary`` where their class calls the family's function.

    That function is a global of the class's Python module. The modules get a ``forward`` with the
    same code over other globals, so nothing that others see is replaced.
    """
    tables = [table for pair in backbone.rope_tables().values() for table in pair]
    for part in backbone.layers.modules():
        forward = inspect.unwrap(type(part).forward)
        if not isinstance(forward, FunctionType):
            continue
        if ROTARY_FUNCTION not in forward.__code__.co_names:
            continue
        original = forward.__globals__[ROTARY_FUNCTION]
        interleaved = rotary_kind(original, backbone.head_dim)
        if interleaved is None or not all(_paired(table, interleaved) for table in tables):
            continue
        changed = dict(forward.__globals__)
        changed[ROTARY_FUNCTION] = partial(_rotated, rotary, original, interleaved)
        hooked = FunctionType(
            forward.__code__, changed, forward.__name__, forward.__defaults__, forward.__closure__
        )
        hooked.__kwdefaults__ = forward.__kwdefaults__
        part.forward = MethodType(hooked, part)


def _rotated(
    rotary: Rotary,
    original: Apply,
    interleaved: bool,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor]:
    """What takes the place of a family's function ``original``."""
    if cos.shape[-1] != q.shape[-1]:  # some families slice the rotated part in this function
        return original(q, k, cos, sin)
    return rotary(q, cos, sin, interleaved), rotary(k, cos, sin, interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of ``x [1, heads, R, hd]`` by ``cos, sin [1, R, hd]``.

    Pairs of neighbours (``interleaved``), or of elements half a head apart, are rotated.
    """
    half = x.shape[-1] // 2
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    else:
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


def rotary_kind(apply: Apply, head_dim: int) -> bool | None:
    """Which form of ``rotate`` a family's rotary function is: True for interleaved, False for
    halves.

    None for neither. Both are tried on numbers, because families use the same name for different
    formulas.
    """
    if head_dim % 2:
        return None
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 3, head_dim, generator=generator)
    k = torch.randn(1, 2, 3, head_dim, generator=generator)
    angles = torch.randn(1, 3, head_dim // 2, generator=generator)
    for interleaved in (False, True):
        if interleaved:
            whole = angles.repeat_interleave(2, dim=-1)
        else:
            whole = torch.cat([angles, angles], dim=-1)
        cos = whole.cos()
        sin = whole.sin()
        try:
            rotated_q, rotated_k = apply(q, k, cos, sin)
        except (TypeError, RuntimeError, IndexError):
            return None
        same_q = _close(rotated_q, rotate(q, cos, sin, interleaved))
        same_k = _close(rotated_k, rotate(k, cos, sin, interleaved))
        if same_q and same_k:
            return interleaved
    return None


def _close(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and torch.allclose(got, expected, atol=1e-6)


def _paired(table: Tensor, interleaved: bool) -> bool:
    """Whether a table holds each angle twice, as ``rotate`` expects, so that half is enough."""
    if table.shape[-1] % 2:
        return False
    if interleaved:
        return torch.equal(table[:, 0::2], table[:, 1::2])
    first, second = table.chunk(2, dim=-1)
    return torch.equal(first, second)
