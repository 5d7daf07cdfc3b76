"""Quantized forms: how near they are, and that ONNX Runtime computes with them row by row."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ssdevice.config import StreamConfig
from ssdevice.export.calibration.grid import Rounded
from ssdevice.export.onnx.quantization import BLOCK, INT4, INT8, int4_layout, schemes, simulated
from ssdevice.export.plan import Quant
from ssdevice.export.weights import Part, Scheme, stored
from ssdevice.model.loading import build
from tests.export.onnx.forms import linears_model

RNG = np.random.default_rng(0)


def rounded(weight: np.ndarray, scheme: Scheme) -> Rounded:
    """``weight [K, N]`` in a scheme."""
    assert scheme.rounds is not None
    return scheme.rounds(torch.from_numpy(weight.T))


def error(weight: np.ndarray, form: Rounded) -> np.ndarray:
    """How much each weight changes, ``[K, N]``."""
    return np.abs(form.dequantized().numpy().T - weight)


def test_int8_errs_by_half_a_level_at_most() -> None:
    weight = RNG.standard_normal((96, 40)).astype(np.float32)
    form = rounded(weight, INT8)
    assert (error(weight, form) <= form.scale[:, 0].numpy() * 0.5001).all()
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
    form = rounded(weight, INT8)
    even = inputs // 2 * 2
    codes = form.codes[:, 0].numpy().astype(int)
    scale = form.scale[:, 0].numpy()
    pairs = codes[:, 0:even:2] + codes[:, 1:even:2]
    assert np.abs(pairs).max(initial=0) * 255 < 2**15
    assert (error(weight, form) <= scale * 0.5001).all()
    # Never coarser than seven bits, and eight where no two neighbours stand in the way.
    assert (scale <= np.abs(weight).max(axis=0) / 63.5).all()
    assert inputs > 1 or (np.abs(codes) == 127).all()


@pytest.mark.parametrize("inputs", [32, 40, 704])
def test_int4_errs_by_half_a_level_but_at_the_end_of_the_range(inputs: int) -> None:
    weight = RNG.standard_normal((inputs, 24)).astype(np.float32)
    form = rounded(weight, INT4)
    assert int4_layout(form)[0].shape == (24, -(-inputs // BLOCK), BLOCK // 2)
    # 16 codes around a zero point of 8 reach 7 levels to one side and 8 to the other; a level is a
    # bfloat16, so eight of them may lack 8 / 2^8 of one.
    level = np.repeat(np.abs(form.scale.numpy()), BLOCK, axis=1).T[:inputs]
    assert (error(weight, form) <= level * (1.0001 + 8 / 2**8)).all()


def test_columns_of_zeros_stay_zero() -> None:
    weight = np.zeros((64, 3), np.float32)
    for scheme in (INT8, INT4):
        assert not rounded(weight, scheme).dequantized().any()


def test_a_block_of_zeros_adds_nothing_to_a_product() -> None:
    weight = RNG.standard_normal((256, 256)).astype(np.float32)
    weight[32:96] = 0
    weight[:, 7] = 0
    assert (rounded(weight, INT4).scale[:, 1:3] == 0).all()
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
    table = stored(model, schemes(quant))
    stay = {one.names[0] for one in table if one.role.part == Part.OWN_FACTOR}
    assert stay == {
        f"streams.{term}.{side}.weight" for term in ("token", "f") for side in ("down", "up")
    }
