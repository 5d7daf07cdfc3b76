"""``research/figures.py``, ``rotation.py`` and ``sweep.py``: what they measure, and that they
run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softmax

from research import figures, rotation, sweep
from ssdevice.model import loading
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import collate
from ssdevice.train.loss import LossWeights, StreamingLoss
from tests.runtime import tiny_bundle as tiny

IDS = (1, 5, 9, 3, 7, 7, 2, 11, 4, 6, 8, 1, 3, 5)
BATCH = collate([Sample(IDS, 8)], 0)


@pytest.fixture
def model() -> Any:
    return loading.load(tiny.base_folder(), Path(tiny.adapter_folder()), 64).model.eval()


@torch.no_grad()
def stream_states(model: Any, node: int) -> Tensor:
    """Final states ``[γ, D]`` of one node's streams."""
    probe = StreamingLoss(model, LossWeights(0.0, 1.0))
    read, _, rows = probe.run_main(BATCH.tokens)
    return probe.run_streams(read, torch.tensor([[node]]), BATCH.tokens, rows)[0]


def turned(x: Tensor, tables: tuple[Tensor, Tensor], at: int) -> Tensor:
    """Rotary embedding of ``x [heads, d]`` at a position."""
    cos, sin = (table[at] for table in tables)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@torch.no_grad()
@pytest.mark.parametrize(("epsilon", "positions"), [(0.4, True), (0.4, False), (0.0, True)])
def test_rotation_is_equation_8(model: Any, epsilon: float, positions: bool) -> None:
    """The streams of one node through the MSA layer, stream by stream and head by head, in complex
    numbers.
    """
    backbone = model.backbone
    node = 9
    layer = backbone.layers[model.first_msa]
    (tables,) = backbone.rope_tables().values()
    attention = layer.self_attn
    probe = StreamingLoss(model, LossWeights(0.0, 1.0))
    state = probe.run_main(BATCH.tokens)[0][0]
    heads = backbone.config.num_attention_heads
    dim = backbone.head_dim

    def projected(linear: Any, h: Tensor) -> Tensor:
        return linear(layer.input_layernorm(h)).reshape(-1, dim)  # type: ignore[no-any-return]

    keys = [turned(projected(attention.k_proj, state[i]), tables, i) for i in range(node + 1)]
    values = [projected(attention.v_proj, state[i]) for i in range(node + 1)]
    expected = []
    for n in range(1, model.gamma + 1):
        at = node + n * positions
        keys.append(turned(projected(attention.k_proj, state[node]), tables, at))
        real, imaginary = values[node].chunk(2, -1)
        product = torch.complex(real, imaginary) * torch.exp(torch.tensor(1j * epsilon * n))
        values.append(torch.cat([product.real, product.imag], -1))
        query = turned(projected(attention.q_proj, state[node]), tables, at)
        out = []
        for head in range(heads):
            group = head // (heads // backbone.kv_heads)
            scores = torch.stack([query[head] @ key[group] for key in keys]) * dim**-0.5
            out.append(softmax(scores, 0) @ torch.stack([value[group] for value in values]))
        h = state[node] + attention.o_proj(torch.cat(out))
        expected.append(h + layer.mlp(layer.post_attention_layernorm(h)))
    with rotation.told_apart(epsilon, positions):
        found = stream_states(model, node)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stream_states(model, node), found), (
        "outside the context streams have their identifiers"
    )


def test_half_precision_loses_small_rotations() -> None:
    values = torch.randn(64, 4, 32)
    for dtype in (torch.float16, torch.bfloat16):
        found = [
            rotation.kept(values, 4, rotation.largest(n, 4), dtype) for n in (512, 8192, 1 << 20)
        ]
        assert sorted(found) == found and found[-1][0] > 0.99


def test_similarities_are_those_of_the_rows_streams_stand_for(model: Any) -> None:
    found = figures.similarities(model, BATCH)
    probe = StreamingLoss(model, LossWeights(0.0, 1.0))
    with torch.no_grad():
        final = probe.run_main(BATCH.tokens)[1][0]
    for j in range(model.gamma):
        nodes = range(7, len(IDS) - j - 2)
        cosines = []
        right = []
        main = []
        for node in nodes:
            stream = stream_states(model, node)[j]
            true = final[node + j + 1]
            cosines.append(cosine_similarity(stream, true, dim=0))
            token = BATCH.tokens[0, node + j + 2]
            right.append(model.backbone.head(stream).argmax() == token)
            main.append(model.backbone.head(true).argmax() == token)
        for name, values in (
            ("cosine", cosines),
            ("right tokens", right),
            ("right tokens of the main row", main),
        ):
            assert found[name][-1][j] == pytest.approx(
                torch.stack(values).float().mean().item(), abs=1e-5
            ), name
    started = found["cosine of the row it started from"][0]
    assert len(found["cosine"]) == 2 and all(-1 <= value <= 1 for value in started)


def test_sweep_trains_measures_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shared mode; then figures of what it trained, and a second run that runs nothing again."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": "abc" * n, "completion": "cab" * 4} for n in (1, 2, 3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = str(tiny.base_folder())
    out = tmp_path / "out"
    words = ["--model", base, "--data", str(data), "--dev", str(data), "--out", str(out)]
    words += [
        "--steps",
        "2",
        "--answer-tokens",
        "6",
        "--batch-size",
        "2",
        "--msa-layers",
        "1",
        "--precision",
        "fp32",
    ]
    sweep.main([*words, "--rank", "2,4", "--gamma", "2"])
    first = capsys.readouterr().out
    assert "| rank=4 |" in first and first.count("\n") == 4
    (out / "centre" / "adapter_model.safetensors").unlink()
    sweep.main([*words, "--rank", "2,4", "--gamma", "2"])
    assert capsys.readouterr().out == first

    figures.main(
        [
            "--model",
            base,
            "--adapter",
            str(out / "rank=4"),
            "--data",
            str(data),
            "--out",
            str(tmp_path / "figures"),
        ]
    )
    found = json.loads((tmp_path / "figures" / "figures.json").read_text())
    slopes = found["gradients"]["trained"]
    assert len(slopes["losses"]) == 3 and len(slopes["norms of MLPs"]) == 2
    assert all(norm > 0 for layer in slopes["norms of MLPs"] for norm in layer)
    assert {path.name for path in (tmp_path / "figures").glob("*.svg")} == {*figures.plots(found)}
