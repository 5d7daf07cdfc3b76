"""Matrices on a target's grid: they lose little on the inputs they are made for, and the target
keeps their codes.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the export extra")
from torch import Tensor  # noqa: E402

from ssdevice.export.calibration.grid import (  # noqa: E402
    Grid,
    calibrated,
    lowest,
    symmetric,
    unclipped,
)
from ssdevice.export.onnx.quantization import INT4, int4_layout  # noqa: E402

GRIDS = {
    "lowest": INT4.grid,
    "unclipped": Grid(32, unclipped, -8, 7),
    "symmetric": Grid(32, symmetric, -7, 7),
    "channel": Grid(None, symmetric, -7, 7),
}


FORMS = [(lowest, -8, 7), (symmetric, -7, 7), (unclipped, -8, 7)]


def matrix(outputs: int = 48, inputs: int = 96) -> Tensor:
    """Weights with outliers, a block of zeros and weights of one sign."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.03
    weight[::7, 5] *= 20
    weight[3, 32:64] = 0
    weight[4] = weight[4].abs()
    weight[5] = -weight[5].abs()
    return weight


def inputs(width: int, rows: int = 400) -> Tensor:
    """Rows that mostly lie in a space of few dimensions, with one channel that stands out and one
    that never speaks.
    """
    generator = torch.Generator().manual_seed(1)
    rows_ = torch.randn(rows, 12, generator=generator) @ torch.randn(12, width, generator=generator)
    rows_ += 0.3 * torch.randn(rows, width, generator=generator)
    rows_[:, 7] *= 30
    rows_[:, 9] = 0
    return rows_


def to_nearest(weight: Tensor, grid: Grid) -> Tensor:
    """A grid's own rounding, for widths its blocks divide."""
    blocks = weight.reshape(len(weight), -1, grid.block or weight.shape[1])
    _, _, scale = grid.anchors(blocks)
    scale = torch.where(scale == 0, 1.0, scale)[..., None]
    return ((blocks / scale).round().clamp(grid.low, grid.high) * scale).reshape(weight.shape)


@pytest.mark.parametrize("name", GRIDS)
def test_products_lose_less_than_a_third_of_what_they_lose_to_nearest(name: str) -> None:
    weight = matrix()
    x = inputs(96)
    made = calibrated(weight, x.T @ x, GRIDS[name])

    def loss(rounded: Tensor) -> float:
        return float((x @ (rounded - weight).T).square().sum())

    assert loss(made) < loss(to_nearest(weight, GRIDS[name])) / 3


@pytest.mark.parametrize("name", GRIDS)
def test_rounding_to_nearest_changes_nothing(name: str) -> None:
    x = inputs(96)
    made = calibrated(matrix(), x.T @ x, GRIDS[name])
    assert torch.equal(to_nearest(made, GRIDS[name]), made)
    assert torch.equal(made.half().float(), made), "float16 does not hold the values"


@pytest.mark.parametrize("width", [96, 80, 20])
def test_onnx_stores_the_values_as_they_are(width: int) -> None:
    x = inputs(width)
    made = calibrated(matrix(inputs=96)[:, :width], x.T @ x, INT4.grid)
    rounded = INT4.rounds(made)
    assert torch.equal(rounded.dequantized(), made)
    packed, scale = int4_layout(rounded)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scale.shape, 32).astype(int) - 8
    values = (codes * scale[..., None]).reshape(len(made), -1)[:, :width]
    assert np.array_equal(values.astype(np.float32), made.numpy())


def test_executorch_stores_the_values_as_they_are() -> None:
    pytest.importorskip("torchao", reason="needs the executorch extra")
    from ssdevice.export.executorch.quantization import INT4 as STORED
    from ssdevice.export.executorch.quantization import four_bits

    x = inputs(96)
    linear = torch.nn.Linear(96, 48, bias=False)
    made = calibrated(matrix(), x.T @ x, STORED.grid)
    linear.weight = torch.nn.Parameter(made.clone(), requires_grad=False)
    four_bits(linear)
    assert torch.equal(linear.weight.dequantize(), made)


@pytest.mark.parametrize("per_channel", [False, True])
def test_core_ml_stores_the_values_as_they_are(per_channel: bool) -> None:
    pytest.importorskip("coremltools", reason="needs the coreml extra")
    from coremltools.optimize._utils import compute_qparams

    x = inputs(96)
    weight = matrix()
    from ssdevice.export.mlprogram.weights import INT4_BLOCK, INT4_CHANNEL

    grid = (INT4_CHANNEL if per_channel else INT4_BLOCK).grid
    weight[3] = weight[4]  # coremltools divides blocks of zeros by zero
    made = calibrated(weight, x.T @ x, grid)
    block = [1, 0] if per_channel else [1, 32]
    codes, scale, _ = compute_qparams(
        made.half().numpy(), 4, True, "LINEAR_SYMMETRIC", np.int8, block
    )
    values = codes.reshape(48, scale.shape[1], -1).astype(np.float16) * scale[..., None]
    assert np.array_equal(values.reshape(48, 96).astype(np.float32), made.numpy())


def test_grids_know_their_largest_codes() -> None:
    blocks = torch.tensor([[1.0, -2.0, 0.5], [4.0, -4.2, 0.0], [4.0, -3.0, 0.0]])
    found = [Grid(3, *form).anchors(blocks)[1].tolist() for form in FORMS]
    assert found == [[-8, -8, -8], [-7, -7, 7], [-8, 7, 7]]
    assert lowest(blocks, -8, 7)[2].tolist() == pytest.approx([0.25, 0.525, -0.5])
