"""A program whose writes became outputs computes what torch's own decomposition computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("coremltools")

from ssdevice.export.mlprogram.graph import functional


class Counter(nn.Module):
    """Adds ``x [2, 3]`` to its state ``[6]``; returns what stood there before as ``[3, 2]``, and
    ``x``.
    """

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.arange(6, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.state.to(torch.float64).reshape(3, 2) + 1
        self.state.copy_(self.state + x.flatten())
        return before, x.to(torch.float32)


class Reads(Counter):
    """Reads what it has written."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.state.copy_(x.flatten()) + 1, x


def test_writes_are_outputs_and_values_stay() -> None:
    x = torch.randn(2, 3)
    program = functional(torch.export.export(Counter().eval(), (x,)))
    decomposed = torch.export.export(Counter().eval(), (x,)).run_decompositions({})
    kinds = [(spec.kind, spec.target) for spec in program.graph_signature.output_specs]
    assert kinds == [(spec.kind, spec.target) for spec in decomposed.graph_signature.output_specs]
    assert program.dialect == decomposed.dialect
    ours = program.module()
    theirs = decomposed.module()
    for _ in range(2):
        for mine, other in zip(ours(x), theirs(x), strict=True):
            assert mine.dtype == other.dtype and torch.equal(mine, other)
        assert torch.equal(ours.state, theirs.state)


def test_a_state_that_is_read_after_its_write_is_refused() -> None:
    program = torch.export.export(Reads().eval(), (torch.randn(2, 3),))
    with pytest.raises(AssertionError, match="is read"):
        functional(program)
