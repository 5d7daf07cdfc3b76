"""``train --recipe``: what it trains is the papers' equations, and its export is their step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ssdevice.adapters.settings import read_settings
from ssdevice.bench.equality import Asked, Comparison
from ssdevice.bench.modes import compare_modes
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import Precision
from ssdevice.cli import main
from ssdevice.config import Schedule
from ssdevice.export.plan import ExportOptions, Quant, make_plan
from ssdevice.export.target import export_target
from ssdevice.model.loading import load
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.train import trainer
from ssdevice.train.loss import LossWeights, StreamingLoss
from tests.export.models import LAYERS, write_base
from tests.model.literal import Literal
from tests.once import made_once

RECIPES = {"paper": ["--init-rank", "3", "--adapter-rank", "5"], "paper-v1": ["--lora-rank", "4"]}
GAMMA = 3
MSA = 2
ALPHAS = {"paper": (0.0, 1.0), "paper-v1": (1.0, 0.1)}  # the second paper's appendix M
ROWS = [("a b c", "d e f g h"), ("x", "y z a"), ("m n", "o p q r s t u")]
SEQUENCES = [([7, 21, 3, 44, 9], 2), ([5, 8, 13, 2, 30, 6, 17, 40], 3)]
"""Tokens, and how many of them are the prompt."""


def base() -> Path:
    return made_once("export/base", write_base)


def data() -> Path:
    def write(out: Path) -> None:
        out.write_text(
            "\n".join(json.dumps({"prompt": p, "completion": c}) for p, c in ROWS) + "\n"
        )

    return made_once("recipes/data.jsonl", write)


def command(recipe: str, out: Path, *extra: str) -> list[str]:
    return [
        "train",
        "--model",
        str(base()),
        "--data",
        str(data()),
        "--app",
        "app",
        "--out",
        str(out),
        "--recipe",
        recipe,
        "--gamma",
        str(GAMMA),
        "--msa-layers",
        str(MSA),
        "--steps",
        "8",
        "--lr",
        "3e-2",
        "--precision",
        "fp32",
        "--threads",
        "1",
        "--quiet",
        *extra,
    ]


def trained(recipe: str) -> Path:
    """An adapter of the recipe; ``weights``: the LossWeights that it was trained with."""

    def train(out: Path) -> None:
        optimize = trainer.optimize
        seen = list[LossWeights]()

        def noting(job: Any, loss: StreamingLoss, order: Any, fresh: bool) -> list[list[float]]:
            seen.append(loss.weights)
            return optimize(job, loss, order, fresh)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "optimize", noting)
            assert main(command(recipe, out / "adapter", *RECIPES[recipe])) == 0
        torch.save(vars(seen[0]), out / "weights")

    return made_once(f"recipes/{recipe}", train)


def tuned_weights(adapter: Path) -> dict[str, Tensor]:
    """The base's weights, with W + alpha / r B A where there is a LoRA."""
    weights = {
        name: value.double() for name, value in load_file(base() / "model.safetensors").items()
    }
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    if (adapter / "adapter_config.json").is_file():
        scale = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] / 4
        lora = load_file(adapter / "adapter_model.safetensors")
        for name, a in lora.items():
            if name.endswith("lora_A.weight"):
                b = lora[name.replace("lora_A", "lora_B")]
                target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                weights[target] = weights[target] + scale * b.double() @ a.double()
    return weights


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_what_the_paper_has_and_nothing_else(recipe: str) -> None:
    streams = load_file(trained(recipe) / "adapter" / "streams.safetensors")
    expected = {"identifiers": (GAMMA, 128)}
    if (
        recipe == "paper"
    ):  # f = UV of rank η, and in each MSA layer an adapter of rank R_s where the MLP was
        expected |= {"f.down.weight": (3, 128), "f.up.weight": (128, 3)}
        for layer in range(LAYERS - MSA, LAYERS):
            expected |= {
                f"adapters.{layer}-mlp.down.weight": (5, 128),
                f"adapters.{layer}-mlp.up.weight": (128, 5),
            }
    assert {name: tuple(value.shape) for name, value in streams.items()} == expected
    assert all(value.abs().max() > 0 for value in streams.values())
    assert (trained(recipe) / "adapter" / "adapter_model.safetensors").is_file() == (
        recipe == "paper-v1"
    )


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_the_loss_of_a_recipe_is_the_sum_of_the_papers(recipe: str) -> None:
    """First eq. 5, second eq. 6, of a reference that has the equations only."""
    adapter = trained(recipe) / "adapter"
    config = read_settings(adapter).streams
    model = load(base(), adapter, 64).model
    literal = Literal(
        model.backbone.config,
        tuned_weights(adapter),
        config,
        load_file(adapter / "streams.safetensors"),
    )
    main_weight, stream_weight = ALPHAS[recipe]
    wanted = 0.0
    for tokens, prompt in SEQUENCES:
        answer = tokens[prompt:]  # y_1 .. y_T
        for t in range(1, len(answer) + 1):
            logits, streams = literal.stream_logits(tokens[: prompt + t - 1])  # x and y_<t
            wanted -= main_weight * float(logits.log_softmax(-1)[answer[t - 1]])
            for j in range(1, GAMMA + 1):
                if t + j <= len(answer):
                    wanted -= stream_weight * float(
                        streams[j - 1].log_softmax(-1)[answer[t + j - 1]]
                    )

    width = max(len(tokens) for tokens, _ in SEQUENCES)
    batch = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in SEQUENCES])
    prompts = torch.tensor([p for _, p in SEQUENCES])
    lengths = torch.tensor([len(s) for s, _ in SEQUENCES])
    weights = LossWeights(**torch.load(trained(recipe) / "weights"))
    total, _ = StreamingLoss(model, weights)(batch, prompts, lengths)
    assert float(total) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.wide
def test_the_export_of_a_recipe_runs_the_papers_step(tmp_path: Path) -> None:
    """Verify and draft in one pass; speculative decoding equals plain decoding, whichever node a
    step ends at.
    """
    options = [
        "--context",
        "64",
        "--chunk",
        "8",
        "--tree",
        "[[0],[1],[0,0],[0,0,0]]",
        "--quant",
        "fp32",
        "--quiet",
    ]
    models = [
        "--model",
        str(base()),
        "--adapter",
        f"app={trained('paper') / 'adapter'}",
        "--target",
        "onnx",
    ]
    assert main(["export", *models, *options, "--out", str(tmp_path / "bundle")]) == 0
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.schedule is Schedule.FUSED
    engine = open_engine(bundle, None, EngineOptions())
    shown = export_target("onnx").logits_engine(bundle, None, EngineOptions())
    prompts = [tokens for tokens, _ in SEQUENCES]
    result = compare_modes(engine, shown, Asked(prompts, (), 24, Precision.FP32, lambda *_: None))
    engine.close()
    assert (
        result.nodes_ended == set(range(5))
        and Comparison.faults(result) == []
        and result.differences == []
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_papers_schedule_is_a_default(recipe: str, tmp_path: Path) -> None:
    for given, planned in ((None, Schedule.FUSED), (Schedule.DEFERRED, Schedule.DEFERRED)):
        adapters = (("app", trained(recipe) / "adapter"),)
        options = ExportOptions(
            str(base()), "onnx", Quant.FP32, tmp_path / "x", adapters, schedule=given
        )
        assert make_plan(options, export_target("onnx").exporter(options)).schedule is planned


@pytest.mark.parametrize(
    ("recipe", "given", "message"),
    [
        ("paper", "--token-rank 8", "--token-rank 8: --recipe paper has 0"),
        ("paper", "--mode shared", "--mode shared: --recipe paper has lossless"),
        ("paper", "--stream-mlp adapter", "--stream-mlp adapter: --recipe paper has adapter-only"),
        ("paper-v1", "--mode lossless", "--mode lossless: --recipe paper-v1 has shared"),
        ("paper-v1", "--by-reach", "--by-reach True: --recipe paper-v1 has False"),
        ("paper-v1", "--draft-vocabulary 32", "--draft-vocabulary 32: --recipe paper-v1 has 0"),
        ("paper-v1", "--msa-layers 0", "--msa-layers 0: --recipe paper-v1 has streams"),
        (
            "paper-v1",
            "--objective next-token",
            "--recipe has no effect: next-token training has no streams",
        ),
    ],
)
def test_what_a_paper_does_not_have_is_refused(
    recipe: str, given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(recipe, tmp_path / "x"), *given.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not (tmp_path / "x").exists()
