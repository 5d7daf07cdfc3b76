"""Quantized forms: how near they are, and that ONNX Runtime computes with them row by row."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ssdevice.config import StreamConfig
from ssdevice.export.onnx.quantization import BLOCK, Int4Weight, Int8Weight, simulated
from ssdevice.export.plan import Quant
from ssdevice.model.loading import build
from ssdevice.model.roles import roles_of
from tests.export.onnx.forms import linears_model

RNG = np.random.default_rng(0)


def test_int8_errs_by_half_a_level_at_most() -> None:
    weight = RNG.standard_normal((96, 40)).astype(np.float32)
    form = Int8Weight.of(weight)
    assert (np.abs(form.dequantized() - weight) <= form.scale * 0.5001).all()
    assert form.codes.min() >= -127


@pytest.mark.parametrize("inputs", [1, 2, 7, 96])
@pytest.mark.parametrize("kind", ["normal", "flat", "equal"])
def test_int8_neighbours_fit_a_sum_of_16_bits(inputs: int, kind: str) -> None:
    draws = {
        "normal": RNG.standard_normal,
        "flat": lambda shape: RNG.uniform(0.4, 1, shape),
        "equal": np.ones,
    }
    weight = (draws[kind]((inputs, 40)) * RNG.exponential(1, 40)).astype(np.float32)
    form = Int8Weight.of(weight)
    even = inputs // 2 * 2
    pairs = form.codes[0:even:2].astype(int) + form.codes[1:even:2]
    assert np.abs(pairs).max(initial=0) * 255 < 2**15
    assert (np.abs(form.dequantized() - weight) <= form.scale * 0.5001).all()
    # Never coarser than seven bits, and eight where no two neighbours stand in the way.
    assert (form.scale <= np.abs(weight).max(axis=0) / 63.5).all()
    assert inputs > 1 or (np.abs(form.codes) == 127).all()


@pytest.mark.parametrize("inputs", [32, 40, 704])
def test_int4_errs_by_half_a_level_but_at_the_end_of_the_range(inputs: int) -> None:
    weight = RNG.standard_normal((inputs, 24)).astype(np.float32)
    form = Int4Weight.of(weight)
    assert form.codes.shape == (24, -(-inputs // BLOCK), BLOCK // 2)
    # 16 codes around a zero point of 8 reach 7 levels to one side and 8 to the other; a level is a
    # bfloat16, so eight of them may lack 8 / 2^8 of one.
    level = np.repeat(np.abs(form.scale), BLOCK, axis=1).T[:inputs]
    assert (np.abs(form.dequantized() - weight) <= level * (1.0001 + 8 / 2**8)).all()


def test_columns_of_zeros_stay_zero() -> None:
    weight = np.zeros((64, 3), np.float32)
    assert not Int8Weight.of(weight).dequantized().any()
    assert not Int4Weight.of(weight).dequantized().any()


def test_a_block_of_zeros_adds_nothing_to_a_product() -> None:
    weight = RNG.standard_normal((256, 256)).astype(np.float32)
    weight[32:96] = 0
    weight[:, 7] = 0
    assert (Int4Weight.of(weight).scale[:, 1:3] == 0).all()
    x = np.zeros((1, 8, 256), np.float32)
    x[..., 32:96] = RNG.standard_normal((1, 8, 64)) * 1000
    (product,) = linear_graph(8, [weight.T], Quant.INT4).run(None, {"x": x})
    assert not product.any()


def linear_graph(rows: int, weights: list[np.ndarray], quant: Quant) -> ort.InferenceSession:
    return ort.InferenceSession(linears_model(rows, weights, quant))


@pytest.mark.parametrize("quant", [Quant.FP32, Quant.INT8, Quant.INT4])
def test_rows_do_not_see_each_other(quant: Quant) -> None:
    weights = [RNG.standard_normal((n, 256)).astype(np.float32) for n in (256, 128)]
    many = linear_graph(8, weights, quant)
    one = linear_graph(1, weights, quant)
    x = RNG.standard_normal((1, 8, 256)).astype(np.float32)
    outputs = many.run(None, {"x": x})
    changed = x.copy()
    changed[:, 3:] = RNG.standard_normal((1, 5, 256)) * 1000
    changed[:, 4] = 0
    again = many.run(None, {"x": changed})
    for before, after in zip(outputs, again, strict=True):
        np.testing.assert_array_equal(before[:, :3], after[:, :3])
        assert np.isfinite(after).all()
        assert not after[:, 4].any(), "a row of zeros gives zeros"
    for i in range(8):
        for whole, alone in zip(outputs, one.run(None, {"x": x[:, i : i + 1]}), strict=True):
            np.testing.assert_allclose(whole[:, i], alone[:, 0], rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(
    ("quant", "error"), [(Quant.FP32, 1e-6), (Quant.INT8, 0.02), (Quant.INT4, 0.15)]
)
def test_products_are_near_those_of_float(quant: Quant, error: float) -> None:
    weights = [RNG.standard_normal((n, 704)).astype(np.float32) for n in (256, 64)]
    x = RNG.standard_normal((1, 5, 704)).astype(np.float32)
    for weight, out in zip(
        weights, linear_graph(5, weights, quant).run(None, {"x": x}), strict=True
    ):
        exact = x @ weight.T
        assert np.square(out - exact).mean() ** 0.5 <= error * np.square(exact).mean() ** 0.5


@pytest.mark.parametrize("quant", [Quant.INT8, Quant.INT4])
def test_terms_of_the_streams_themselves_stay_floats(quant: Quant) -> None:
    """Hidden states are far larger than embeddings: rounded together, nothing would be left of the
    token.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = build(
        LlamaForCausalLM(config).eval(),
        StreamConfig(msa_layers=1, token_rank=300, init_rank=300),
        32,
    )
    streams = model.streams
    assert streams is not None and len(streams.own_terms()) == 2
    for term in streams.own_terms():
        torch.nn.init.normal_(term.up.weight)
    h = 1e3 * torch.randn(1, 1, 64)
    chosen = torch.randn(1, 1, 64)
    expected = streams.start(h, 4, chosen)
    with simulated(model, quant):
        assert torch.equal(streams.start(h, 4, chosen), expected)
    roles = roles_of(model)
    stay = {name for name, role in roles.items() if role.own}
    assert stay == {
        f"streams.{term}.{side}.weight" for term in ("token", "f") for side in ("down", "up")
    }
