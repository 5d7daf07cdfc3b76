"""Moves outliers of what linears read into their weights (SmoothQuant, arXiv 2211.10438, eq. 4).

A few channels of a real model are many times as large as the others, and eight bits of a row must
reach to its largest value. If whatever writes the channels, a norm or another linear, is divided by
a factor for each of them, and the columns of the linears that read them are multiplied by it,
products stay the same but rows are more even.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ssdevice.export.calibration.rows import Rows
from ssdevice.export.weights import multiplies
from ssdevice.model.mapped import release
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import StreamRowAdapter
from ssdevice.text.tokenizer import ChatTokenizer, Sample

NOTE = (
    "outliers of channels are moved into the weights of the linears that read them, "
    "so that rounded rows are even"
)
"""The note in a bundle whose model was smoothed.

It is a part of the format, because `verify --model` looks for it.
"""
STRENGTH = 0.5
"""How much of the range goes from inputs to weights: both are rounded to eight bits."""
SAME = 1e-3
"""Largest change of a channel of a layer's result, as a part of its largest value, that counts as
float rounding.
"""
TEXTS = (
    "How do I keep bread fresh? Wrap it in a cloth, keep it in a dry place, and do not put it into "
    "the fridge.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([3, 5, 10]))  # 6.0",
    "The train leaves at 17:45 and takes 2 hours and 20 minutes, so it arrives at 20:05. A ticket "
    "costs $48.90.",
    "name: Ann, age: 31, city: Zürich; name: Tomás, age: 27, city: Lima. Wie viele Personen sind "
    "älter als 30?",
)
"""Which channels are large hardly depends on the text; which neurons of an MLP are does."""


@dataclass
class _Read:
    """What some linears read: its largest values by channel, and those of their weights."""

    linears: dict[nn.Linear, None] = field(default_factory=dict)
    rows: Tensor | None = None
    weights: Tensor | None = None

    def factors(self) -> Tensor | None:
        """What to divide the channels by; None if no main row was seen."""
        if self.rows is None or self.weights is None:
            return None
        used = (self.rows > 0) & (self.weights > 0)
        return torch.where(
            used, self.rows**STRENGTH / self.weights ** (1 - STRENGTH), 1.0
        ).nan_to_num(1.0, 1.0)


def texts(tokenizer: ChatTokenizer) -> list[Sample]:
    """The rows on which channels are measured."""
    return [Sample(tuple(ids), len(ids) // 2) for ids in map(tokenizer.encode, TEXTS)]


@torch.no_grad()
def smooth(
    model: StreamModel, rows: Sequence[Sample], report: Callable[[int], None] = lambda _: None
) -> int:
    """Smooth what linears of the layers read, where each layer's results stay; returns how often
    that was possible.

    Main rows decide the factors, so they are the same with streams and without. ``report`` hears
    which layer begins.
    """
    passing = Rows(model, rows)
    smoothed = 0
    for number, layer in enumerate(model.backbone.layers):
        report(number)
        with _results(layer) as before, _reads(model, layer) as found:
            passing.run(number, advance=False)
        for read, writers in _pairs(layer, found):
            factors = read.factors()
            same = partial(_same, passing, number, layer, before)
            if factors is not None and any(_moved(one, read, factors, same) for one in writers):
                smoothed += 1
        passing.run(number, advance=True)
        release()
    return smoothed


@contextmanager
def _results(layer: nn.Module) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []
    with layer.register_forward_hook(
        lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out)
    ):
        yield found


def _same(passing: Rows, number: int, layer: nn.Module, before: list[Tensor]) -> bool:
    with _results(layer) as after:
        passing.run(number, advance=False)
    # By channel: beside an outlier every other channel's change would look small.
    pairs = [(a.flatten(0, -2), b.flatten(0, -2)) for a, b in zip(after, before, strict=True)]
    return all(bool(((a - b).abs().amax(0) <= SAME * b.abs().amax(0)).all()) for a, b in pairs)


@contextmanager
def _reads(model: StreamModel, layer: nn.Module) -> Iterator[dict[nn.Module | None, list[_Read]]]:
    """Within this context: what the layer's linears read, by the norm that wrote it, None for
    anything else.
    """
    found: dict[nn.Module | None, list[_Read]] = {None: []}
    last: dict[nn.Module, Tensor] = {}

    def wrote(norm: nn.Module, _: object, out: Tensor) -> None:
        last[norm] = out

    def reads(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert multiplies(linear)
        writer = next((norm for norm, out in last.items() if out is inputs[0]), None)
        known = found.setdefault(writer, [])
        own = next((read for read in known if writer is not None or linear in read.linears), None)
        if own is None:
            known.append(own := _Read())
        own.linears[linear] = None
        if model.streams is None or model.streams.split.main is None:
            own.rows = _largest(own.rows, inputs[0].flatten(0, -2))
            own.weights = _largest(own.weights, linear.weight)

    with ExitStack() as hooks:
        for part in layer.modules():
            if multiplies(part):
                hooks.enter_context(part.register_forward_pre_hook(reads))
            elif getattr(getattr(part, "weight", None), "ndim", 0) == 1:  # a norm
                hooks.enter_context(part.register_forward_hook(wrote))
        yield found


def _largest(known: Tensor | None, values: Tensor) -> Tensor:
    """The largest magnitude of each column ``[n, D] -> [D]``, or the known one."""
    own = values.abs().amax(dim=0)
    return own if known is None else torch.maximum(known, own)


Written = list[tuple[Tensor, float]]
"""Parameters with the channels as their leading dimension, and what is added to each before it is
used.
"""


def _pairs(
    layer: nn.Module, found: dict[nn.Module | None, list[_Read]]
) -> Iterator[tuple[_Read, list[Written]]]:
    """What linears read, and the parameters that may have written it, to be tried one after the
    other.
    """
    for norm, reads in found.items():
        if norm is not None:
            # Some families store a norm's weight less one.
            yield reads[0], [_norm(norm, offset) for offset in (0.0, 1.0)]
    for owner in layer.modules():
        if isinstance(owner, StreamRowAdapter):
            continue
        parts = [linears for linears in map(_linears, owner.children()) if linears]
        for own in parts:
            read = next(
                (read for read in found[None] if read.rows is not None and own[0] in read.linears),
                None,
            )
            if read is not None:
                columns = {
                    linear: None for linear in own if linear.in_features == own[0].in_features
                }
                others = [
                    _writing(part, own[0].in_features)
                    for part in reversed(parts)
                    if part is not own
                ]
                yield _Read(columns, read.rows, read.weights), [one for one in others if one]


def _norm(norm: nn.Module, offset: float) -> Written:
    """The parameters of a norm, if its weight is used with ``offset`` added."""
    values = norm.parameters(recurse=False)
    return [(value, offset if value is norm.weight else 0.0) for value in values]


def _linears(part: nn.Module) -> list[nn.Linear]:
    """A linear, and what stream rows have beside it or instead of it."""
    if multiplies(part):
        return [part]
    if isinstance(part, StreamRowAdapter) and multiplies(part.base):
        return [inner for inner in part.modules() if multiplies(inner)]
    return []


def _writing(linears: list[nn.Linear], width: int) -> Written:
    """The parameters of those linears that write ``width`` channels."""
    return [
        (p, 0.0)
        for linear in linears
        if linear.out_features == width
        for p in linear.parameters(recurse=False)
    ]


def _moved(written: Written, read: _Read, factors: Tensor, same: Callable[[], bool]) -> bool:
    """Divide what was written and multiply those that read it; taken back unless results are the
    ``same``.
    """
    changed = [parameter for parameter, _ in written] + [linear.weight for linear in read.linears]
    kept = [parameter.detach().clone() for parameter in changed]
    for parameter, offset in written:
        by = factors.reshape(-1, *[1] * (parameter.ndim - 1))
        parameter.data.copy_((parameter + offset) / by - offset)
    for linear in read.linears:
        linear.weight.data.mul_(factors)
    if same():
        return True
    for parameter, values in zip(changed, kept, strict=True):
        parameter.data.copy_(values)
    return False
