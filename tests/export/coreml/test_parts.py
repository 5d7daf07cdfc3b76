"""The pieces of the Core ML export that need no conversion."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the export extra")
from ssdevice.errors import ConfigError  # noqa: E402
from ssdevice.export.mlprogram import ops as coreml_ops  # noqa: E402
from ssdevice.export.mlprogram.half import HalfNorm, half_norm, half_precision  # noqa: E402
from ssdevice.export.mlprogram.options import CoreMLOptions, Deployment, KVWrite  # noqa: E402
from ssdevice.export.mlprogram.weights import (  # noqa: E402
    FLOAT16,
    INT4_BLOCK,
    INT4_CHANNEL,
    INT8,
    PALETTE4,
    schemes,
)
from ssdevice.export.plan import ExportOptions, Quant  # noqa: E402
from ssdevice.export.weights import Part, Role, Scheme  # noqa: E402
from ssdevice.model.loading import build  # noqa: E402
from tests.model.tiny import MODELS, tiny_model  # noqa: E402

CALLS_LAYER_NORM = ("OlmoLayerNorm", "NemotronLayerNorm1P")


@pytest.mark.parametrize(
    ("part", "shape", "quant", "per_channel", "scheme"),
    [
        (Part.DOWN, (64, 64), Quant.FP16, False, FLOAT16),
        (Part.DOWN, (64, 64), Quant.INT8, False, INT8),
        (Part.DOWN, (64, 64), Quant.INT4, False, INT4_BLOCK),
        (Part.DOWN, (64, 48), Quant.INT4, True, INT4_CHANNEL),
        (Part.DOWN, (64, 48), Quant.INT4, False, INT8),
        (Part.DOWN, (64, 64), Quant.PALETTE4, False, PALETTE4),
        (Part.HEAD, (100, 64), Quant.INT4, False, INT4_BLOCK),
        (Part.EMBEDDING, (100, 64), Quant.INT4, False, INT8),
        (Part.EMBEDDING, (100, 64), Quant.PALETTE4, False, INT8),
        (Part.DOWN, (8, 8), Quant.INT8, False, FLOAT16),
        (Part.FACTOR, (64, 64), Quant.INT4, False, FLOAT16),
        (Part.OWN_FACTOR, (64, 64), Quant.INT4, False, FLOAT16),
        (Part.DRAFT, (64, 64), Quant.INT4, False, FLOAT16),
    ],
)
def test_scheme_of_a_weight(
    part: Part, shape: tuple[int, int], quant: Quant, per_channel: bool, scheme: Scheme
):
    found, uneven = schemes(quant, per_channel).of(Role(part), torch.zeros(shape))
    assert found is scheme
    assert uneven == (quant is Quant.INT4 and scheme is INT8 and part is Part.DOWN)


@pytest.mark.parametrize("length", [0, 3, 9])
def test_writing_by_mask_is_writing_by_slice(length: int):
    torch.manual_seed(0)
    state = torch.randn(2, 3, 12, 4).half()
    rows = torch.randn(2, 3, 3, 4).half()
    at = torch.tensor([length], dtype=torch.int32)
    sliced = state.clone()
    masked = state.clone()
    coreml_ops.write_slice(sliced, rows, at)
    coreml_ops.write_masked(masked, rows, at)
    assert torch.equal(sliced, masked)
    assert torch.equal(sliced[:, :, length : length + 3], rows)


@pytest.mark.parametrize("family", MODELS)
def test_every_norm_is_one_operation_or_has_a_half_form(family: str):
    backbone = build(tiny_model(family), None, 64).backbone
    norms = [
        part
        for part in backbone.modules()
        if isinstance(part, torch.nn.LayerNorm) or type(part).__name__.endswith("Norm")
    ]
    assert norms
    for part in norms:
        one_operation = (
            isinstance(part, torch.nn.LayerNorm) or type(part).__name__ in CALLS_LAYER_NORM
        )
        assert one_operation or half_norm(part) is not None, type(part).__name__


def test_norms_of_large_rows_stay_finite_in_half():
    x = torch.tensor([[3000.0, 1.0, -2.0, 0.5], [1e-4, 0.0, -1e-4, 2e-4], [0.0, 0.0, 0.0, 0.0]])
    norm = HalfNorm(torch.ones(4), 1e-6)
    exact = x * torch.rsqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-6)
    assert not torch.isfinite(x.half() ** 2).all()
    assert torch.allclose(norm.half()(x.half()).double(), exact, rtol=4e-3, atol=2e-3)


def test_half_precision_leaves_the_model_as_it_is():
    model = build(tiny_model("llama"), None, 64)
    before = [type(part) for part in model.modules()]
    mask = model.backbone.mask_value
    half = half_precision(model)
    assert any(isinstance(part, HalfNorm) for part in half.modules())
    assert half.backbone.mask_value == -1e4
    assert [type(part) for part in model.modules()] == before
    assert model.backbone.mask_value == mask


def test_core_ml_choices_are_refused_for_other_targets(tmp_path):
    with pytest.raises(ConfigError, match="--kv-write"):
        ExportOptions(
            "m", "onnx", Quant.INT8, tmp_path, target_options=(CoreMLOptions(KVWrite.MASK),)
        )
    with pytest.raises(ConfigError, match="--per-channel"):
        ExportOptions(
            "m", "coreml", Quant.INT8, tmp_path, target_options=(CoreMLOptions(per_channel=True),)
        )
    with pytest.raises(ConfigError, match="--deployment-target"):
        chosen = CoreMLOptions(deployment_target=Deployment.IOS26)
        ExportOptions("m", "onnx", Quant.INT8, tmp_path, target_options=(chosen,))


@pytest.mark.parametrize(
    ("text", "target"), [("iOS18", "iOS18"), ("macos15", "iOS18"), ("macOS26", "iOS26")]
)
def test_systems_of_one_age_are_one_deployment_target(text: str, target: str):
    assert Deployment(text) == target


@pytest.mark.parametrize("text", ["iOS17", "macOS14", "", "iOS99"])
def test_a_deployment_target_without_states_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"too old or unknown.*states.*iOS18 \(macOS15\)"):
        Deployment(text)
