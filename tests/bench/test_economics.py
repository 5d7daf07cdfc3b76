"""What apps cost: by hand on a tiny base, and against the figures of 2402.11131's successor (table 3, appendix C)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssdevice.bench.economics import (
    LLAMA_2_7B,
    PHI_3_MINI,
    BaseShape,
    DraftModel,
    Eagle,
    LosslessStreams,
    Medusa,
    Plain,
    Row,
    Streams,
    compare,
    proportioned_draft,
)
from ssdevice.bench.economics_report import as_json, readable
from ssdevice.cli import main
from ssdevice.errors import ConfigError

TINY = BaseShape(hidden=8, intermediate=12, vocab=20, layers=3, heads=2, kv_heads=1, head_dim=4)


def test_a_tiny_base_by_hand() -> None:
    # q 8x8, k and v 8x4, o 8x8, gate and up 8x12, down 12x8
    assert TINY.layer == 64 + 32 + 32 + 64 + 96 + 96 + 96
    assert TINY.parameters == 2 * 20 * 8 + 3 * (480 + 16) + 8
    assert TINY.low_rank(2) == 2 * (16 + 12 + 12 + 16 + 20 + 20 + 20)
    assert Streams(gamma=3).parameters(TINY) == 3 * 8
    assert Streams(gamma=3, pruning_rank=2).parameters(TINY) == 3 * 8 + 2 * 2 * 8
    assert LosslessStreams(gamma=3, msa_layers=2, rank=2).parameters(TINY) == 3 * 8 + 2 * 232
    assert Medusa(heads=2).parameters(TINY) == 2 * (64 + 8 + 160)
    assert Eagle().parameters(TINY) == 480 + 128
    assert DraftModel(TINY).parameters(LLAMA_2_7B) == TINY.parameters


def test_totals_are_the_base_once_and_every_app() -> None:
    economics = compare(TINY, (Plain(), Medusa(2), LosslessStreams(3, 2, 2)), lora_rank=2, bits=16, base_bytes=1000)
    lora = 3 * 232 * 2
    assert [(row.extra, row.per_app) for row in economics.rows] == [(0, lora), (928, lora + 928), (976, 976)]
    assert economics.total(economics.rows[1], 5) == 1000 + 5 * (lora + 928)
    shown = as_json(economics, 3)
    assert shown["methods"][1]["total_bytes"] == [1000 + n * (lora + 928) for n in (1, 2, 3)]
    assert compare(TINY, base_bits=4).base_bytes == TINY.parameters // 2


@pytest.mark.parametrize(
    ("base", "medusa", "eagle", "streams"),
    [(LLAMA_2_7B, "5.9E+08", "2.4E+08", "8.2E+04"), (PHI_3_MINI, "4.3E+08", "1.3E+08", "6.1E+04")],
)
def test_the_extra_parameters_are_those_of_table_3(base: BaseShape, medusa: str, eagle: str, streams: str) -> None:
    assert f"{Medusa().parameters(base):.1E}" == medusa
    assert f"{Eagle().parameters(base):.1E}" == eagle
    assert f"{Streams(gamma=4, pruning_rank=8).parameters(base):.1E}" == streams


def test_ten_apps_with_medusa_heads_are_larger_than_the_base_of_appendix_c() -> None:
    economics = compare(LLAMA_2_7B, (Medusa(), Streams(pruning_rank=8)))
    medusa, streams = economics.rows
    assert f"{medusa.extra / 1e9:.1f}" == "1.2"
    assert f"{10 * medusa.extra / 1e9:.1f}" == "11.8"
    assert 10 * medusa.extra > economics.base_bytes > 1000 * 10 * streams.extra
    assert f"{LLAMA_2_7B.parameters / 1e9:.3f}" == "6.738"


def test_the_draft_model_has_the_proportions_of_llama_68m() -> None:
    draft = proportioned_draft(LLAMA_2_7B)
    assert (draft.hidden, draft.intermediate, draft.layers) == (768, 3072, 2)
    assert round(draft.parameters / 1e6) == 68


def test_a_config_that_lacks_a_size_is_refused() -> None:
    config = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 20, "num_hidden_layers": 3}
    with pytest.raises(ConfigError, match="config.json: 'num_attention_heads' is 'None'"):
        BaseShape.of(config, "config.json")
    whole = {**config, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None}
    assert BaseShape.of(whole, "config.json") == TINY
    with pytest.raises(ConfigError, match="layers is 0"):
        BaseShape.of({**whole, "num_hidden_layers": 0}, "config.json")
    with pytest.raises(ConfigError, match="expected 0 or more"):
        compare(TINY, lora_rank=-1)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 20, "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps({**sizes, "num_attention_heads": 2, "num_key_value_heads": 1}))
    (folder / "model.safetensors").write_bytes(bytes(3000))
    return folder


def test_the_command_measures_files_of_adapters(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = base.parent / "sql"
    adapter.mkdir()
    for name, size in {"adapter_model.safetensors": 500, "streams.safetensors": 30, "streams.json": 7}.items():
        (adapter / name).write_bytes(bytes(size))
    (adapter / "README.md").write_bytes(bytes(99))
    assert main(["bundle", "economics", "--model", str(base), "--adapter", f"sql={adapter}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["base"] == {"parameters": TINY.parameters, "bytes": 3000, "measured": True}
    row = shown["methods"][-1]
    assert (row["name"], row["extra_bytes"], row["bytes_per_app"], row["measured"]) == ("sql", 37, 537, True)
    assert row["total_bytes"][49] == 3000 + 50 * 537 and len(row["total_bytes"]) == 50
    assert main(["bundle", "economics", "--model", str(base), "--quiet"]) == 0
    assert "Medusa heads" in capsys.readouterr().out


def test_the_command_measures_apps_of_a_bundle(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bundle.samples import write_sample

    folder = write_sample(base.parent / "bundle").folder
    assert main(["bundle", "economics", "--model", str(base), "--bundle", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["methods"][-1]["bytes_per_app"] == 4


def test_a_picture_is_written(base: Path) -> None:
    pytest.importorskip("matplotlib")
    file = base.parent / "a.png"
    assert main(["bundle", "economics", "--model", "llama-2-7b", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["bundle", "economics", "--model", "llama-2-7b", "--plot", str(base.parent / "a.nosuch")]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere"], "no such folder; without weights, llama-2-7b and phi-3-mini are known"),
        (["--adapter", "sql"], "expected NAME=DIR"),
        (["--adapter", "sql=nowhere"], "no adapter folder"),
        (["--bundle", "nowhere"], "no such bundle"),
    ],
)
def test_wrong_input_is_one_line(
    options: list[str], message: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options if "--model" in options else ["--model", str(base), *options]
    assert main(["bundle", "economics", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_sizes_are_readable() -> None:
    assert [readable(n) for n in (0, 999, 1000, 14_400_000, 123_456_789, 6_738_000_000)] == [
        "0 B", "999 B", "1.00 kB", "14.4 MB", "123 MB", "6.74 GB",
    ]  # fmt: skip
    assert Row("a", None, 1, 2, True).parameters is None
