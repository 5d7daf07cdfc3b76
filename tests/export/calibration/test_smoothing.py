"""Smoothing changes no result, makes rows of outliers more even, and leaves alone what it cannot
change.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the export extra")
from torch import Tensor, nn  # noqa: E402

from ssdevice.bench.against_torch import main_logits  # noqa: E402
from ssdevice.config import Mode, StreamConfig  # noqa: E402
from ssdevice.export.calibration.smoothing import smooth  # noqa: E402
from ssdevice.export.onnx.quantization import simulated  # noqa: E402
from ssdevice.export.plan import Quant  # noqa: E402
from ssdevice.model.loading import build  # noqa: E402
from ssdevice.model.step import StreamModel  # noqa: E402
from ssdevice.text.tokenizer import Sample  # noqa: E402
from tests.export.deep import OUTLIERS, VOCAB, deep_model  # noqa: E402
from tests.model.tiny import LAYERS, MODELS, tiny_model  # noqa: E402

ROWS = [Sample(tuple(range(start, start + 30)), 15) for start in (3, 40, 60)]
QUICK = ("llama", "gemma2", "opt-before", "stablelm")
IDS = [7, 3, 90, 41, 5, 66, 12, 33, 8, 11, 54, 2]


@torch.no_grad()
def results(model: StreamModel) -> tuple[Tensor, Tensor]:
    """Logits of main rows, and final states of the streams of the last one."""
    from ssdevice.train.loss import LossWeights, StreamingLoss

    loss = StreamingLoss(model, LossWeights(main=1.0, stream=1.0))
    middle, _, rows = loss.run_main(torch.tensor([IDS]))
    return main_logits(model, IDS), loss.run_streams(
        middle, torch.tensor([[len(IDS) - 2]]), torch.tensor([IDS]), rows
    )


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.LOSSLESS])
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.wide)
        for name in sorted(MODELS)
    ],
)
def test_no_result_changes(name: str, mode: Mode) -> None:
    """In any family, for main rows and streams."""
    torch.manual_seed(0)
    model = build(
        tiny_model(name), StreamConfig(mode=mode, gamma=3, msa_layers=2, adapter_rank=4), 64
    ).eval()
    for adapter in model.streams.adapters.values():
        nn.init.normal_(adapter.up.weight, std=0.1)
    before = results(model)
    assert smooth(model, ROWS) >= LAYERS, "at least what the MLPs end with"
    for was, now in zip(before, results(model), strict=True):
        assert (was - now).abs().max() <= 1e-4 * was.abs().max()


def test_rows_with_outliers_lose_less() -> None:
    """Three channels of every norm are made 30 times as large and their columns as small: smoothing
    takes that back.
    """
    texts = torch.randint(VOCAB, (8, 24), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(model: StreamModel) -> Tensor:
        return torch.stack([main_logits(model, text) for text in texts])

    @torch.no_grad()
    def error(model: StreamModel) -> float:
        exact = logits(model)
        with simulated(model, Quant.INT8):
            return float((logits(model) - exact).pow(2).mean().sqrt() / exact.std())

    model = deep_model("llama", 6, Mode.SHARED)
    even = error(model)
    for layer in model.backbone.layers:
        norm = layer.input_layernorm
        linears = [getattr(layer.self_attn, f"{part}_proj") for part in "qkv"]
        for weight, factor in (
            (norm.weight, 30.0),
            *((linear.weight, 1 / 30) for linear in linears),
        ):
            weight.data[..., OUTLIERS] *= factor
    planted = error(model)
    assert planted > 1.5 * even
    assert smooth(model, ROWS) == 18, "two norms and an MLP of each layer"
    assert error(model) < 1.1 * even


def test_factors_are_those_of_main_rows() -> None:
    """A model gets the same weights with folded stream adapters, with others, without streams."""
    first = deep_model("llama", 4, Mode.LOSSLESS)
    second = deep_model("llama", 4, Mode.LOSSLESS)
    assert second.streams is not None
    second.streams.fold()
    for model in (first, second):
        smooth(model, ROWS)
    for one, other in zip(first.backbone.layers, second.backbone.layers, strict=True):
        assert torch.equal(one.input_layernorm.weight, other.input_layernorm.weight)


def test_a_norm_that_something_else_reads_stays() -> None:
    class Adds(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, h: Tensor, **others: object) -> Tensor:
            out = self.layer(h, **others)
            out = (out[0] if isinstance(out, tuple) else out) + self.layer.get_submodule(
                "input_layernorm"
            )(h)
            out[..., 0] += 1e5  # an outlier, beside which no other channel's change is large
            return out

    model = deep_model("llama", 4, Mode.SHARED)
    model.backbone.layers[1] = Adds(model.backbone.layers[1])
    before = model.backbone.layers[1].layer.input_layernorm.weight.clone()
    whole = results(model)
    assert smooth(model, ROWS) == 11
    assert torch.equal(model.backbone.layers[1].layer.input_layernorm.weight, before)
    assert (whole[0] - results(model)[0]).abs().max() <= 1e-4 * whole[0].abs().max()
