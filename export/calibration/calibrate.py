"""Calibration of a model: layer by layer, on what the layers before it give once they are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ssdevice.errors import SSDeviceError
from ssdevice.export.calibration.grid import Grid
from ssdevice.export.calibration.rounding import calibrated
from ssdevice.export.calibration.rows import Rows
from ssdevice.model.mapped import release
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import low_rank_factors
from ssdevice.text.tokenizer import Sample


@torch.no_grad()
def calibrate(
    model: StreamModel,
    rows: Sequence[Sample],
    grid_of: Callable[[nn.Linear, bool], Grid | None],
    report: Callable[[int], None],
) -> None:
    """Give every linear of the layers that has a grid weights on it.

    ``grid_of(linear, factor)``: ``factor`` says whether it is one of a low-rank term. ``report`` hears which layer
    begins. Raises SSDeviceError for rows on which the model computes numbers that are not finite.
    """
    passing = Rows(model, rows)
    factors = low_rank_factors(model)
    for number, layer in enumerate(model.backbone.layers):
        report(number)
        linears = [part for part in layer.modules() if isinstance(part, nn.Linear)]
        grids = {part: grid for part in linears if (grid := grid_of(part, part in factors)) is not None}
        with _moments(list(grids)) as moments:
            passing.run(number, advance=False)
        for group in _alike(moments, grids):
            if not moments[group[0]].isfinite().all():
                raise SSDeviceError(f"calibration: layer {number} gives values that are not finite; see the rows' text")
            together = torch.cat([part.weight for part in group])
            values = calibrated(together, moments[group[0]], grids[group[0]])
            for part, own in zip(group, torch.split(values, [part.out_features for part in group]), strict=True):
                part.weight.data.copy_(own)
        passing.run(number, advance=True)
        release()


@contextmanager
def _moments(linears: Sequence[nn.Linear]) -> Iterator[dict[nn.Linear, Tensor]]:
    """Within this context: the sum of ``x xᵀ`` over all rows that a linear reads; those that read none are left out."""
    found: dict[nn.Linear, Tensor] = {}
    last: list[tuple[Tensor, Tensor]] = []  # several linears read one input

    def read(part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(part, nn.Linear)
        if not last or last[0][0] is not inputs[0]:
            x = inputs[0].reshape(-1, part.in_features)
            last[:] = [(inputs[0], x.T @ x)]
        found[part] = found[part].add_(last[0][1]) if part in found else last[0][1].clone()

    with ExitStack() as hooks:
        for part in linears:
            hooks.enter_context(part.register_forward_pre_hook(read))
        yield found


def _alike(moments: Mapping[nn.Linear, Tensor], grids: Mapping[nn.Linear, Grid]) -> list[list[nn.Linear]]:
    """Linears that read the same inputs and have the same grid, together: their columns are rounded once."""
    groups: list[list[nn.Linear]] = []
    for part, own in moments.items():
        for group in groups:
            if grids[group[0]] == grids[part] and torch.equal(moments[group[0]], own):
                group.append(part)
                break
        else:
            groups.append([part])
    return groups
