"""``--calibrate``: rows go through the model as in prefill and step, and the bundle has the weights
made with them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the export extra")
from torch import Tensor  # noqa: E402

from ssdevice.bundle.folder import Bundle  # noqa: E402
from ssdevice.bundle.manifest import Precision  # noqa: E402
from ssdevice.cli import main  # noqa: E402
from ssdevice.config import Mode, Schedule, StreamConfig  # noqa: E402
from ssdevice.data import read_examples  # noqa: E402
from ssdevice.errors import SSDeviceError  # noqa: E402
from ssdevice.export.calibration.calibrate import (  # noqa: E402
    ROWS,
    calibrate,
    calibrated_job,
    chosen_rows,
)
from ssdevice.export.calibration.rows import Rows, tokenized  # noqa: E402
from ssdevice.export.exporter import ExportJob  # noqa: E402
from ssdevice.export.onnx.exporter import OnnxExporter  # noqa: E402
from ssdevice.export.onnx.quantization import INT4, simulated  # noqa: E402
from ssdevice.export.onnx.target import OnnxTarget  # noqa: E402
from ssdevice.export.plan import ExportOptions, Quant, make_plan  # noqa: E402
from ssdevice.export.weights import Schemes  # noqa: E402
from ssdevice.model.loading import build, load  # noqa: E402
from ssdevice.model.step import StreamModel  # noqa: E402
from ssdevice.model.tokenizer import open_tokenizer  # noqa: E402
from ssdevice.text.tokenizer import Sample  # noqa: E402
from ssdevice.tree import Tree  # noqa: E402
from tests.export.deep import VOCAB, deep_model  # noqa: E402
from tests.model.reference import Reference  # noqa: E402
from tests.model.tiny import VOCAB as TINY_VOCAB  # noqa: E402
from tests.model.tiny import tiny_model  # noqa: E402

BASE = Path(__file__).resolve().parents[3] / "models" / "base-7m"
WORDS = "abcdefghijklmnopqrstuvwxyz"


def rows(count: int, vocab: int, seed: int = 0) -> list[Sample]:
    """Ids that follow each other by a rule, so that inputs move together as those of text do."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        start = draw.integers(3, vocab)
        step = draw.integers(1, 5)
        made.append(Sample(tuple(int(start + step * i) % (vocab - 3) + 3 for i in range(40)), 30))
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    lines = [
        json.dumps(
            {
                "prompt": " ".join(draw.choice(list(WORDS), 12)),
                "completion": " ".join(draw.choice(list(WORDS), 8)),
            }
        )
        for _ in range(6)
    ]
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.LOSSLESS])
def test_rows_pass_the_layers_as_in_prefill(name: str, mode: Mode) -> None:
    """Main rows give prefill's token, and streams of the last prompt token its drafts."""
    model = deep_model(name, 4, mode)
    prompt = rows(1, VOCAB)[0].ids
    reference = Reference(
        model, Tree.chain(model.gamma), 1, Schedule.DEFERRED, 64, chunk=len(prompt)
    )
    token, drafts = reference.start(prompt, reference.new_cache())
    with torch.no_grad():
        passing = Rows(model, [Sample(prompt, len(prompt))])
        for layer in range(model.backbone.num_layers):
            passing.run(layer, advance=True)
        streams = passing.streams[0]
        assert streams is not None
        assert int(model.backbone.head(passing.main[0])[0, -1].argmax()) == token
        at = torch.tensor([len(prompt) - 1], dtype=torch.int32)
        assert torch.equal(model.best(streams, torch.tensor([token]), at, 1), drafts)


@torch.no_grad()
def test_rows_pass_draft_layers_as_in_prefill() -> None:
    """Main rows give the base's token, the first draft of the last prompt token is prefill's."""
    config = StreamConfig(Mode.LOSSLESS, gamma=2, msa_layers=0, adapter_rank=0, draft_layers=1)
    model = build(tiny_model("mistral"), config, 64).eval()
    assert model.own is not None
    for linear in (model.own.fuse, model.own.embed):
        torch.nn.init.normal_(linear.weight, std=0.3)
    prompt = rows(1, TINY_VOCAB)[0].ids
    reference = Reference(model, Tree.chain(2), 1, Schedule.DEFERRED, 64, chunk=len(prompt))
    token, drafts = reference.start(prompt, reference.new_cache())
    passing = Rows(model, [Sample((*prompt, token), len(prompt))])
    for layer in range(len(model.backbone.layers)):
        passing.run(layer, advance=True)
        if layer == model.backbone.num_layers - 1:
            assert int(model.backbone.head(passing.main[0])[0, -2].argmax()) == token
    first = passing.streams[0]
    assert first is not None
    assert int(model.draft_logits(model.finish(first))[0, 0].argmax()) == int(drafts[0, 0])


def loss(model: StreamModel, held: list[Sample], exact: list[Tensor]) -> float:
    """Mean KL divergence to ``exact`` logits, in nats."""
    found = zip(exact, logits(model, held), strict=True)
    return float(sum((a.exp() * (a - b)).sum(-1).mean() for a, b in found)) / len(held)


@torch.no_grad()
def logits(model: StreamModel, held: list[Sample]) -> list[Tensor]:
    passing = Rows(StreamModel(model.backbone, None, 0), held)
    for layer in range(model.backbone.num_layers):
        passing.run(layer, advance=True)
    return [torch.log_softmax(model.backbone.head(h)[0], -1) for h in passing.main]


@pytest.mark.skipif(not BASE.is_dir(), reason="the tree holds no models/base-7m")
@pytest.mark.wide
def test_a_trained_model_loses_less_than_half() -> None:
    """Rows it was not calibrated on."""
    tokenizer = open_tokenizer(BASE)
    text = tokenized(read_examples(BASE.parent / "prompts" / "sql.jsonl"), tokenizer, "", 128)
    model = load(BASE, None, 128).model
    held = text[::3]
    exact = logits(model, held)
    with simulated(model, Quant.INT4):
        nearest = loss(model, held, exact)
    calibrate(model, text[1::3] + text[2::3], Schemes(INT4), lambda _: None)
    with simulated(model, Quant.INT4):
        assert loss(model, held, exact) < nearest / 2


def test_rows_that_overflow_are_an_error() -> None:
    model = deep_model("llama", 3)
    with torch.no_grad():
        model.backbone.layers[0].mlp.down_proj.weight *= 1e38
    with pytest.raises(SSDeviceError, match="layer 1 .* not finite"):
        calibrate(model, rows(1, VOCAB), Schemes(INT4), lambda _: None)


def test_rows_are_the_same_whenever_they_are_chosen(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"row {i}"}) for i in range(3 * ROWS)))
    chosen = chosen_rows([file])
    assert len(set(chosen)) == ROWS
    assert chosen == chosen_rows([file])


@pytest.mark.wide
def test_a_bundle_has_the_calibrated_weights(
    base: Path, lossless: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate compares it with them, its manifest says on how many rows, and no reference rounds
    to nearest.
    """
    out = tmp_path / "bundle"
    flags = ["--context", "96", "--chunk", "16", "--quant", "int4", "--out", str(out), "--quiet"]
    model = ["--model", str(base), "--target", "onnx", "--adapter", f"app={lossless}"]
    assert main(["export", *model, *flags, "--calibrate", str(data)]) == 0
    manifest = Bundle.open(out).manifest
    assert manifest.calibrated_rows == 6
    assert manifest.notes[0] == "int4 weights of the layers were calibrated on 6 of the app's rows"
    capsys.readouterr()
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated_rows"] == 6
    assert OnnxTarget().as_stored(Bundle.open(out), None, deep_model("llama", 3)) == (
        None,
        Precision.INT4,
    )


def test_apps_that_stand_apart_share_a_calibrated_base(
    base: Path, with_lora: Path, data: Path, tmp_path: Path
) -> None:
    options = ExportOptions(
        str(base),
        "onnx",
        Quant.INT4,
        tmp_path / "b",
        (("app", with_lora),),
        context=96,
        slots=True,
        calibrate=(data,),
    )
    target = OnnxExporter()
    plan = make_plan(options, target)
    job = ExportJob.of(plan, lambda *_: None)
    made = calibrated_job(job, target)
    alone = load(base, None, 96).model.backbone.layers[0].mlp.up_proj.weight
    first = made.loaded.model.backbone.layers[0].mlp.up_proj.base.weight
    second = made.for_app(plan.apps[1]).loaded.model.backbone.layers[0].mlp.up_proj.weight
    assert torch.equal(first, second)
    assert not torch.equal(first, alone)


@pytest.mark.parametrize(
    ("target", "quant"), [("onnx", "fp32"), ("onnx", "int8"), ("coreml", "palette4")]
)
def test_a_precision_without_a_grid_is_refused(
    base: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
    quant: str,
) -> None:
    if target == "coreml":
        pytest.importorskip("coremltools", reason="needs the coreml extra")
    flags = [
        "--target",
        target,
        "--quant",
        quant,
        "--calibrate",
        str(data),
        "--out",
        str(tmp_path / "b"),
    ]
    assert main(["export", "--model", str(base), *flags]) == 2
    assert (
        f"--calibrate: target {target} takes it for int4, not for {quant}"
        in capsys.readouterr().err
    )


def test_a_file_without_rows_is_refused_before_the_model_is_loaded(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", "onnx", "--quant", "int4", "--calibrate", str(tmp_path / "none.jsonl")]
    assert (
        main(["export", "--model", str(base), *flags, "--out", str(tmp_path / "b"), "--quiet"]) == 2
    )
    assert "none.jsonl: no such file" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
