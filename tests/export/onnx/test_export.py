"""``ssdevice export`` to ONNX from end to end, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ssdevice.adapters.settings import read_settings
from ssdevice.bench.equality import Asked, Comparison
from ssdevice.bench.modes import compare_modes
from ssdevice.bundle.folder import Bundle
from ssdevice.cli import main
from ssdevice.config import Mode, Schedule
from ssdevice.contract import GREEDY, PLAIN, PREFILL, STEP, STEP_SHORT
from ssdevice.data import Example
from ssdevice.errors import ParityError
from ssdevice.export import forms as module_forms
from ssdevice.export.driver import EngineDriver
from ssdevice.export.exporter import ExportJob, TargetResult
from ssdevice.export.onnx import exporter
from ssdevice.export.onnx.exporter import WEIGHTS_FILE, OnnxExporter
from ssdevice.export.onnx.graphs import LogitsEngine, parts_of, show_regions
from ssdevice.export.parity.products import QUANTIZED
from ssdevice.export.phrases import LEAST, phrase_table, read_phrases
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.runtime.onnx.kernels import HALF_TREE_ATTENTION, TREE_ATTENTION
from ssdevice.runtime.session import Session
from ssdevice.text.chat_template import PLAIN_PROMPT as NOTE
from ssdevice.text.tokenizer import Sample
from ssdevice.tree import Tree
from tests.conformance.families import write_family
from tests.export.models import write_adapter
from tests.export.onnx import forms
from tests.model.tiny import VOCAB
from tests.once import made_once

TREE = "[[0],[1],[0,0],[0,1],[0,0,0]]"
WIDE = pytest.mark.wide
OTHERS = [pytest.param(quant, marks=WIDE) for quant in ("fp32", "int4")]
"""Than INT8."""
CASES = [
    "int8",
    "int4",
    *(pytest.param(name, marks=WIDE) for name in ("fp32", "own", "heads", "following")),
]


def export(base: Path, out: Path, *flags: str) -> list[str]:
    return [
        "export",
        "--model",
        str(base),
        "--target",
        "onnx",
        "--context",
        "96",
        "--chunk",
        "16",
        "--out",
        str(out),
        "--quiet",
        *flags,
    ]


@pytest.fixture(scope="module")
def exported(
    base: Path,
    adapter: Path,
    lossless: Path,
    waiting: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Bundle]:
    """Makes exports that between them have every quantization, mode and schedule, and other kinds
    of streams.
    """
    folder = tmp_path_factory.mktemp("bundles")
    heads = write_adapter(
        folder / "heads-adapter", base, Mode.LOSSLESS, msa_layers=0, follow_rank=5
    )
    following = write_adapter(folder / "following-adapter", base, follow_rank=65)
    own = write_adapter(
        folder / "own-adapter", base, Mode.LOSSLESS, msa_layers=0, adapter_rank=0, draft_layers=1
    )
    cases = {
        "fp32": (*("--adapter", f"app={adapter}"), "--quant", "fp32", "--tree", TREE),
        "int8": (
            *("--adapter", f"app={lossless}"),
            "--quant",
            "int8",
            "--tree",
            TREE,
            "--schedule",
            "fused",
        ),
        "int4": (*("--adapter", f"app={waiting}"), "--quant", "int4"),
        "heads": (*("--adapter", f"app={heads}"), "--quant", "int8"),
        "following": (*("--adapter", f"app={following}"), "--quant", "int8", "--schedule", "fused"),
        "own": (*("--adapter", f"app={own}"), "--quant", "int8"),
    }

    @cache
    def make(name: str) -> Bundle:
        assert main(export(base, folder / name, *cases[name])) == 0
        return Bundle.open(folder / name)

    return make


@pytest.mark.parametrize("name", CASES)
def test_gate_saw_every_count_and_small_differences(
    exported: Callable[[str], Bundle], name: str
) -> None:
    manifest = exported(name).manifest
    assert manifest.parity["counts"] == exported(name).geometry.tree.emitted
    assert manifest.parity["input_error"] < 1e-5
    assert manifest.parity["product_error"] < (1e-5 if name == "fp32" else QUANTIZED.product / 2)
    if name == "fp32":
        assert manifest.parity["near_ties"] == 0
    assert [spec.name for spec in manifest.functions] == [STEP, PREFILL, PLAIN]
    assert manifest.apps[0].instruction == "Do it."


@pytest.mark.parametrize("name", CASES)
def test_weights_are_stored_once_and_graphs_name_no_path(
    exported: Callable[[str], Bundle], base: Path, repository: Path, name: str
) -> None:
    bundle = exported(name)
    parameters = bundle.manifest.model.parameters
    files = bundle.manifest.files
    # Small weights stay float32, as the notes say; beside the weights stand rotary tables and
    # stream adapters.
    bits = 32 if name == "fp32" else 14
    beside = 160_000 + (0 if name == "fp32" else 4 * 80_000)
    assert files[WEIGHTS_FILE].size < parameters * bits / 8 + beside
    for function in (STEP, PREFILL, PLAIN):
        graph = bundle.file(function).read_bytes()
        assert len(graph) < 400_000
        assert str(repository).encode() not in graph and str(base).encode() not in graph
    assert bool(bundle.manifest.notes) == (name != "fp32")


@pytest.mark.parametrize("name", CASES)
def test_rejected_drafts_change_nothing(exported: Callable[[str], Bundle], name: str) -> None:
    bundle = exported(name)
    g = bundle.geometry
    driver = EngineDriver(open_engine(bundle, None, EngineOptions(threads=1)))
    root, _ = driver.prefill([5, 6, 7, 8, 9], 0)
    truth = [root]
    for i in range(3):
        truth.append(driver.plain(truth[-1], 5 + i))
    plain_rows = driver.rows(5, 7)
    first = [(truth[1] if r == 0 else (truth[1] + r) % g.vocab) for r in range(g.k)]
    seen = []
    for seed in range(4):
        draw = np.random.default_rng(seed)
        others = []
        for _ in range(g.gamma - 1):
            row = draw.integers(0, g.vocab, g.k).tolist()
            others.append([i if i != truth[2] else i + 1 for i in row])
        out = driver.step(root, [first, *others], 5)
        seen.append((out, driver.rows(5, 7)))
        assert out.tokens == truth[1:3]
    for out, rows in seen[1:]:
        np.testing.assert_array_equal(rows, seen[0][1])
        if bundle.manifest.schedule == "deferred":
            assert out.drafts == seen[0][0].drafts
    np.testing.assert_allclose(seen[0][1], plain_rows, atol=1e-4 if name == "fp32" else 0.1)


@pytest.mark.parametrize(
    ("tree", "functions"),
    [
        pytest.param((), GREEDY, marks=WIDE),
        pytest.param(("--tree", "[]"), (PREFILL, PLAIN), marks=WIDE),
    ],
)
def test_without_an_adapter_drafts_repeat_the_text_unless_only_plain_decoding_is_wanted(
    base: Path, tmp_path: Path, tree: tuple[str, ...], functions: tuple[str, ...]
) -> None:
    assert main(export(base, tmp_path / "b", "--quant", "fp32", *tree)) == 0
    bundle = Bundle.open(tmp_path / "b")
    assert tuple(bundle.functions) == functions
    assert bundle.manifest.mode is None and bundle.app().kind == "base"


@WIDE
def test_a_model_without_a_chat_template_is_given_plain_prompts(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base, tmp_path / "bare", ignore=shutil.ignore_patterns("chat_template.jinja"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a b", "completion": " c d"}\n' * 4)
    train = [
        "train",
        "--model",
        str(tmp_path / "bare"),
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--app",
        "app",
    ]
    more = [
        "--out",
        str(tmp_path / "a"),
        "--steps",
        "1",
        "--msa-layers",
        "1",
        "--batch-size",
        "4",
        "--quiet",
    ]
    assert main([*train, *more, "--instruction", "q"]) == 0
    assert NOTE in capsys.readouterr().err
    adapter = ("--adapter", f"app={tmp_path / 'a'}")
    assert main(export(tmp_path / "bare", tmp_path / "b", *adapter, "--quant", "fp32")) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0] == NOTE
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.notes[0] == NOTE
    with Session.open(bundle) as session:
        assert session.prompt_ids("a b") == session.tokenizer.encode("q\na b")
        list(session.generate("a b", max_tokens=4))
    assert (
        main(
            [
                "bench",
                str(tmp_path / "b"),
                "--data",
                str(tmp_path / "rows.jsonl"),
                "--limit",
                "1",
                "--quiet",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0] == NOTE


def test_dry_run_prints_the_plan_and_writes_nothing(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(export(base, tmp_path / "b", "--adapter", f"app={adapter}", "--dry-run")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["gamma"] == 3 and plan["tree_size"] == 4 and plan["estimated_bytes"] > 100_000
    assert not list(tmp_path.iterdir())


def test_an_adapter_brings_the_name_of_its_app(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(export(base, tmp_path / "b", "--adapter", str(adapter), "--dry-run")) == 0
    assert json.loads(capsys.readouterr().out)["apps"] == [read_settings(adapter).app]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/model"], "no such folder"),
        (["--adapter", "app"], "expected NAME=DIR"),
        (["--adapter", "/no/such/adapter"], "no such folder; expected NAME=DIR"),
        (["--adapter", "app=/no/such/adapter"], "no such folder"),
        (["--adapter", "a={adapter}", "--adapter", "A={adapter}"], "two apps have this name"),
        (["--adapter", "a={adapter}", "--tree", "chain:4"], "γ = 3"),
        (["--adapter", "a={adapter}", "--tree", "chain:0"], "chain"),
        (["--tree", TREE], "takes a chain"),
        (["--slots", "--tree", "chain:4"], "without --slots"),
        (["--adapter", "a={adapter}", "--context", "4"], "cannot hold"),
        (["--adapter", "a={adapter}", "--context", "7"], "cannot hold"),
        (["--adapter", "a={adapter}", "--chunk", "0"], "--chunk: 0, expected 1 or more"),
        (["--quant", "fp16"], "has no fp16 form"),
        (["--schedule", "fused"], "--schedule needs an adapter with streams"),
        (
            ["--adapter", "a={adapter}", "--adapter-precision", "fp16"],
            "merged, unless with --slots",
        ),
        (["--adapter", "a={waiting}", "--schedule", "fused"], "run after it: omit --schedule"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    base: Path,
    adapter: Path,
    waiting: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    flags = [flag.format(adapter=adapter, waiting=waiting) for flag in flags]
    assert main(export(base, tmp_path / "b", *flags)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_bases_that_cannot_be_exported_are_refused(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(
        change: dict[str, object] | None, remove: str | None, message: str, *flags: str
    ) -> None:
        folder = tmp_path / "copy"
        shutil.copytree(base, folder)
        if change:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, **change}))
        if remove:
            (folder / remove).unlink()
        assert main(export(folder, tmp_path / "b", *flags)) == 2
        assert message in capsys.readouterr().err
        shutil.rmtree(folder)
        assert not list(tmp_path.iterdir())

    refuse({"model_type": "mamba"}, None, "'mamba' is not supported")
    refuse({"hidden_size": "wide"}, None, "Validation error for field 'hidden_size'")
    refuse(None, "config.json", "no config.json; expected a Hugging Face model folder")
    refuse(None, "tokenizer.json", "tokenizer.json")
    refuse(None, "model.safetensors", "no .safetensors")
    refuse({"hidden_size": 64}, None, "another base", "--adapter", f"app={adapter}")
    refuse({"hidden_size": 64}, None, "[300, 128] in the weights and [300, 64] by config.json")
    refuse({"num_hidden_layers": 4}, None, "the weights lack model.layers.3.")
    refuse({"num_hidden_layers": 2}, None, "config.json only 2 layers")


@pytest.mark.parametrize("size", [0, 4, 500, 50_000])
def test_weights_that_were_cut_short_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    shutil.copytree(base, tmp_path / "copy")
    os.truncate(tmp_path / "copy" / "model.safetensors", size)
    assert main(export(tmp_path / "copy", tmp_path / "b")) == 2
    error = capsys.readouterr().err
    assert f"has {size} bytes" in error and "cut short" in error and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["copy"]


def test_an_existing_output_is_kept(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for flags in ([], ["--overwrite"]):
        assert main(export(base, tmp_path / "mine", *flags)) == 2
        assert "mine" in capsys.readouterr().err
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_wrong_artifact_is_deleted(
    base: Path,
    adapter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = OnnxExporter.export

    def careless(self: OnnxExporter, job: ExportJob, folder: Path) -> TargetResult:
        result = honest(self, job, folder)
        weights = bytearray((folder / WEIGHTS_FILE).read_bytes())
        values = np.frombuffer(weights, np.float32)
        values[: len(values) // 2] *= 1.05
        (folder / WEIGHTS_FILE).write_bytes(weights)
        return result

    monkeypatch.setattr(OnnxExporter, "export", careless)
    flags = ("--adapter", f"app={adapter}", "--quant", "fp32", "--tree", "chain:1")
    assert main(export(base, tmp_path / "b", *flags)) == ParityError.exit_code
    assert "differ" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@WIDE
def test_a_chain_of_one_draft_is_exported(base: Path, tmp_path: Path) -> None:
    following = write_adapter(tmp_path / "adapter", base, follow_rank=5)
    result = compared_along_a_chain(base, following, tmp_path / "bundle", "int8", drafts=1)
    assert result.differences == []


@pytest.mark.parametrize(
    ("ending", "code"), [(KeyboardInterrupt, 130), (OSError(28, "No space left on device"), 1)]
)
def test_an_interrupted_export_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException, code: int
) -> None:
    def stop(self: OnnxExporter, job: ExportJob, folder: Path) -> TargetResult:
        (folder / "half").write_text("x")
        raise ending

    monkeypatch.setattr(OnnxExporter, "export", stop)
    assert main(export(base, tmp_path / "b")) == code
    assert os.listdir(tmp_path) == []


@WIDE
def test_answers_that_end_with_the_context_are_those_of_generate(
    base: Path, waiting: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    bundle = tmp_path / "bundle"
    rows.write_text('{"prompt": "a b c d"}\n')
    assert main(export(base, bundle, "--adapter", f"app={waiting}", "--quant", "fp32")) == 0
    compared = ["--model", str(base), "--adapter", str(waiting), "--max-tokens", "1000"]
    assert main(["verify", str(bundle), "--data", str(rows), *compared, "--quiet"]) == 0


def compared_along_a_chain(
    base: Path, adapter: Path, folder: Path, quant: str, drafts: int = 3, vocab: int = 300
) -> Comparison:
    """All modes of an export with a chain of so many drafts, on random prompts."""
    flags = ("--adapter", f"app={adapter}", "--quant", quant, "--tree", f"chain:{drafts}")
    assert main(export(base, folder, *flags)) == 0
    bundle = Bundle.open(folder)
    engine = LogitsEngine.of(bundle, None, EngineOptions(threads=1))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, vocab, int(size)).tolist() for size in rng.integers(1, 30, 6)]
    return compare_modes(
        engine, engine, Asked(prompts, (), 40, bundle.manifest.precision, lambda *_: None)
    )


@pytest.mark.parametrize("quant", ["int8", *OTHERS])
def test_along_a_chain_all_logits_are_those_of_plain_decoding(
    base: Path, adapter: Path, tmp_path: Path, quant: str
) -> None:
    result = compared_along_a_chain(base, adapter, tmp_path / "bundle", quant)
    assert result.nodes_ended == set(range(4)) and result.largest_change is not None
    assert result.differences == [] and result.largest_change == 0


@WIDE
@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("family", ["opt-after", "phi", "qwen2"])
def test_so_they_are_with_biases_and_with_a_key_head_for_each_query_head(
    family: str, quant: str, tmp_path: Path
) -> None:
    folder = made_once(f"families/{family}", lambda out: write_family(out, family))
    result = compared_along_a_chain(
        folder / "base", folder / "adapter", tmp_path / "bundle", quant, vocab=VOCAB
    )
    assert result.differences == [] and result.largest_change == 0


@WIDE
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_the_head_of_a_draft_vocabulary_has_eight_bits_like_the_whole_one(
    base: Path, tmp_path: Path, quant: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, draft_vocabulary=200)
    assert (
        main(export(base, tmp_path / "bundle", "--adapter", f"app={adapter}", "--quant", quant))
        == 0
    )
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert manifest.parity["product_error"] < QUANTIZED.product / 2


@pytest.mark.parametrize("name", ["int8", *OTHERS])
def test_every_part_of_a_step_is_told_apart(exported: Callable[[str], Bundle], name: str) -> None:
    bundle = exported(name)
    parts = parts_of(bundle.file(STEP))
    assert set(parts.values()) == forms.PARTS
    model = onnx.load(str(bundle.file(STEP)), load_external_data=False)
    show_regions(model)
    graph = model.graph
    assert {node.name for node in graph.node} == set(parts)
    attention = [
        parts[node.name]
        for node in graph.node
        if node.op_type in (TREE_ATTENTION, HALF_TREE_ATTENTION)
    ]
    # Deferred, streams attend by themselves; fused, their rows stand beside those of the tree.
    assert attention.count("layers") >= bundle.manifest.model.layers
    assert ("streams" in attention) == (bundle.manifest.schedule is Schedule.DEFERRED)


@pytest.mark.parametrize("quant", ["int8", *OTHERS])
@pytest.mark.parametrize(
    ("tree", "short"), [pytest.param("chain:3", 0, marks=WIDE), ("chain:4", 2)]
)
def test_a_model_without_streams_verifies_drafts_that_repeat_the_text(
    base: Path, tmp_path: Path, quant: str, tree: str, short: int
) -> None:
    assert main(export(base, tmp_path / "b", "--tree", tree, "--quant", quant)) == 0
    bundle = Bundle.open(tmp_path / "b")
    assert (
        bundle.manifest.mode is None
        and bundle.geometry.tree == Tree.parse(tree)
        and STEP in bundle.functions
    )
    assert bundle.geometry.short == short and (STEP_SHORT in bundle.functions) == (short > 0)
    with Session.open(bundle, threads=1) as session:
        assert not session.streams
        answers = {}
        for speculate in (True, False):
            answers[speculate] = "".join(
                session.generate("a b a b a b", speculate=speculate, max_tokens=30)
            )
        assert answers[True] == answers[False]
        assert session.last.tokens


def test_a_short_step_whose_rows_see_later_drafts_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seeing(name: str, *args: Any) -> Any:
        module: Any = module_forms.function_module(name, *args)
        if name == STEP_SHORT:
            module.ancestors.fill_(True)
        return module

    monkeypatch.setattr(exporter, "function_module", seeing)
    assert main(export(base, tmp_path / "b", "--quant", "int8")) == 1
    assert STEP_SHORT in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_phrases_of_rows_are_in_the_bundle_and_change_no_answer(base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    said = "words that are said again and again"
    rows.write_text((json.dumps({"prompt": "a", "completion": said}) + "\n") * 3)
    assert main(export(base, tmp_path / "b", "--quant", "int8", "--phrases", str(rows))) == 0
    table = Bundle.open(tmp_path / "b").file("phrases")
    with Session.open(tmp_path / "b", threads=1) as session:
        row = session.tokenizer.sample(Example("a", said), "")
        phrases = session.phrases
        assert phrases is not None and phrases.data == table.read_bytes()
        found = [
            phrases.after(row.ids[:place]) == row.ids[place]
            for place in range(row.prompt, len(row.ids))
        ]
        assert sum(found) > len(found) / 2
        answers = [
            "".join(session.generate(said, speculate=each, max_tokens=30)) for each in (True, False)
        ]
        assert answers[0] == answers[1]
        assert read_phrases([table], session.tokenizer, "", VOCAB) == table.read_bytes()


def test_phrases_that_nothing_drafts_or_that_are_none_are_refused(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    damaged = tmp_path / "phrases.bin"
    other = tmp_path / "other.BIN"
    rows.write_text('{"prompt": "a", "completion": "b"}')
    damaged.write_bytes(bytes(12))
    other.write_bytes(phrase_table([Sample(tuple(range(40_000, 40_500)), 1)] * LEAST, 49_152))
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "link.bin").symlink_to(other)
    unread = str(tmp_path / "absent.jsonl")
    for flags, said in (
        (["--phrases", unread, "--adapter", f"app={adapter}"], "without streams"),
        (["--phrases", unread, "--tree", "[]"], "without streams"),
        (["--phrases", unread, "--slots"], "without streams"),
        (["--phrases", str(rows)], "nothing is said 3 times; add answers"),
        (["--phrases", str(other)], "other.BIN: no table of a model with 300 tokens"),
        (["--phrases", str(tmp_path / "link.bin")], "link.bin: no table of a model"),
        (["--phrases", str(other), "--phrases", str(rows)], "is a table: give only this file"),
        (["--phrases", str(tmp_path / "pipe.bin")], "not a plain file"),
        (["--phrases", str(tmp_path)], "is a folder"),
        (["--phrases", str(damaged)], "12 bytes are no table of phrases"),
        (["--phrases", str(tmp_path / "absent.bin")], "no such file"),
    ):
        assert main([*export(base, tmp_path / "b", *flags), "--dry-run"]) == 2
        assert said in capsys.readouterr().err
