"""Moves outliers of normalized hidden states into the weights that read them (SmoothQuant, arXiv 2211.10438, eq. 4).

A few channels of a real model are many times as large as the others, and eight bits of a row must reach to its largest
value. If a norm's weight is divided by a factor for each channel, and the columns of the linears that read the norm are
multiplied by it, products stay the same but what is rounded is more even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ssdevice.export.calibration.rows import Rows, Tokens
from ssdevice.model.mapped import release
from ssdevice.model.step import StreamModel

NOTE = "factors of channels are moved from norms into the linears that read them, so that rounded rows are more even"
"""The note in a bundle whose model was smoothed."""
STRENGTH = 0.5
"""How much of the range goes from inputs to weights: both are rounded to eight bits."""
ROWS, LENGTH = 4, 64
"""Rows of random tokens on which channels are measured: which of them are large hardly depends on the text."""
SAME = 1e-4
"""Largest change of a layer's result, as a part of its largest value, that counts as float rounding."""


@dataclass
class _Read:
    """What reads a norm: ``linears``, the weights' and the rows' largest values by channel, and an input to try."""

    linears: dict[nn.Linear, None] = field(default_factory=dict)
    weights: Tensor | None = None
    rows: Tensor | None = None
    probe: Tensor | None = None


@torch.no_grad()
def smooth(model: StreamModel, report: Callable[[int], None] = lambda _: None) -> int:
    """Smooth every norm of the layers whose output only linears read; returns how many there are.

    Main rows decide the factors, so a model gets the same ones with streams and without. ``report`` hears which layer
    begins. A layer in which something else reads the norm stays as it was.
    """
    ids = torch.randint(0, int(model.backbone.config.vocab_size), (ROWS, LENGTH), generator=_seeded()).tolist()
    passing = Rows(model, [Tokens(tuple(row), LENGTH // 2) for row in ids])
    smoothed = 0
    for number, layer in enumerate(model.backbone.layers):
        report(number)
        with _results(layer) as before, _readers(model, layer) as found:
            passing.run(number, advance=False)
        kept = [(weight, weight.detach().clone()) for weight in _weights(found)]
        folded = sum(_fold(norm, read) for norm, read in found.items())
        with _results(layer) as after:
            passing.run(number, advance=False)
        if all(bool((a - b).abs().max() <= SAME * b.abs().max()) for a, b in zip(after, before, strict=True)):
            smoothed += folded
        else:
            for weight, values in kept:
                weight.data.copy_(values)
        passing.run(number, advance=True)
        release()
    return smoothed


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@contextmanager
def _results(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Within this context: what the layer gives, call by call."""
    found: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def _readers(model: StreamModel, layer: nn.Module) -> Iterator[dict[nn.Module, _Read]]:
    """Within this context: the norms of the layer and the linears that read them."""
    norms = [part for part in layer.modules() if getattr(getattr(part, "weight", None), "ndim", 0) == 1]
    found: dict[nn.Module, _Read] = {}
    last: dict[nn.Module, Tensor] = {}

    def normalized(norm: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        last[norm] = out
        found.setdefault(norm, _Read()).probe = inputs[0]

    def read(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, nn.Linear)
        for norm, out in last.items():
            if out is inputs[0]:
                own = found[norm]
                own.linears[linear] = None
                if model.streams is None or model.streams.split.main is None:
                    own.rows = _larger(own.rows, out.flatten(0, -2))
                    own.weights = _larger(own.weights, linear.weight)

    hooks = [norm.register_forward_hook(normalized) for norm in norms]
    hooks += [part.register_forward_pre_hook(read) for part in layer.modules() if isinstance(part, nn.Linear)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _larger(known: Tensor | None, values: Tensor) -> Tensor:
    """The largest magnitude of each column ``[n, D] -> [D]``, or the known one."""
    own = values.abs().amax(dim=0)
    return own if known is None else torch.maximum(known, own)


def _weights(found: dict[nn.Module, _Read]) -> Iterator[Tensor]:
    """All that smoothing may change."""
    for norm, read in found.items():
        yield from norm.parameters(recurse=False)
        yield from (linear.weight for linear in read.linears)


def _fold(norm: nn.Module, read: _Read) -> bool:
    """Divide a norm by its factors and multiply its readers by them; False if it cannot be divided that way."""
    if read.rows is None or read.weights is None or read.probe is None:
        return False
    tiny = torch.finfo(torch.float32).tiny
    factors = read.rows.clamp(min=tiny) ** STRENGTH / read.weights.clamp(min=tiny) ** (1 - STRENGTH)
    factors = torch.where((read.rows > 0) & (read.weights > 0), factors, torch.ones_like(factors))
    if not _divide(norm, factors, read.probe):
        return False
    for linear in read.linears:
        linear.weight.data.mul_(factors)
    return True


def _divide(norm: nn.Module, factors: Tensor, probe: Tensor) -> bool:
    """Make a norm give its output divided by ``factors``: families store its weight as it is, or less one."""
    wanted = norm(probe) / factors
    own = [(parameter, parameter.detach().clone()) for parameter in norm.parameters(recurse=False)]
    for offset in (0.0, 1.0):
        for parameter, values in own:
            shift = offset if parameter is norm.weight else 0.0
            parameter.data.copy_((values + shift) / factors - shift)
        if torch.allclose(norm(probe), wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max())):
            return True
    for parameter, values in own:
        parameter.data.copy_(values)
    return False
