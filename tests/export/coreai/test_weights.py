"""What is stored of a matrix, and that the reference computes with the same numbers."""

from __future__ import annotations

import pytest

from tests.export.coreai.bundles import ABSENT, base

pytest.importorskip("coreai_torch", reason=ABSENT)

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ssdevice.export.coreai.weights import GROUP, INT4, INT8, Halves, Integers, stored
from ssdevice.export.plan import Quant
from ssdevice.export.weights import Scheme
from ssdevice.model.loading import load
from ssdevice.model.step import StreamModel
from tests.export.coreai.computed import computed

STEP = {Quant.FP32: 0.0, Quant.FP16: 2**-11, Quant.INT8: 0.5 / 127, Quant.INT4: 0.5 / 7}
"""The largest change of a weight, relative to the largest of its matrix."""


def weights(model: StreamModel) -> dict[str, Tensor]:
    parts = model.named_modules()
    return {
        name: part.weight.detach()
        for name, part in parts
        if isinstance(part, (nn.Linear, nn.Embedding))
    }


@pytest.mark.parametrize("quant", STEP)
def test_the_reference_has_the_stored_values_and_gets_its_own_back(quant: Quant) -> None:
    model = load(base(), None, 64).model
    tied = model.backbone.lm_head.weight is model.backbone.embed_tokens.weight
    before = {name: weight.clone() for name, weight in weights(model).items()}
    with stored(model, quant, values=True):
        for name, weight in weights(model).items():
            assert (weight - before[name]).abs().max() <= STEP[quant] * before[
                name
            ].abs().max() * 1.001
            assert quant is Quant.FP32 or not torch.equal(weight, before[name])
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())
    assert tied and model.backbone.lm_head.weight is model.backbone.embed_tokens.weight


@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_rounding_once_more_changes_nothing(scheme: Scheme) -> None:
    form = Integers(scheme)
    matrix = torch.randn(6, 2 * GROUP, generator=torch.Generator().manual_seed(0))
    matrix[0] = 0
    once = form(*form.right_inverse(matrix))
    assert torch.equal(once[0], matrix[0])
    torch.testing.assert_close(form(*form.right_inverse(once)), once, rtol=1e-6, atol=0)


def test_what_the_runtime_would_take_for_zeros_is_not_stored() -> None:
    matrix = torch.linspace(-1e-4, 1e-4, 401).reshape(1, -1)
    stored = Halves().right_inverse(matrix)[0].float()
    least = torch.finfo(torch.float16).tiny
    assert ((stored == 0) | (stored.abs() >= least)).all()
    assert (stored - matrix).abs().max() <= least / 2 * 1.001


def test_the_runtime_multiplies_with_the_stored_halves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 64, bias=False)
    x = torch.randn(5, 256)
    parametrize.register_parametrization(linear, "weight", Halves(), unsafe=True)
    found = computed(linear, x, tmp_path)
    torch.testing.assert_close(found, x @ linear.weight.detach().T, rtol=0, atol=3e-6)
