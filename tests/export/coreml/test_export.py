"""From a model folder to tokens: the whole Core ML export, its files for hosts, and the engine."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.bundle.folder import Bundle
from ssdevice.config import Mode
from ssdevice.contract import CHOOSING, FUNCTIONS, PLAIN, PREFILL, VERIFY_PLAIN, CacheForm
from ssdevice.export.coreml.golden import TEXTS
from ssdevice.export.mlprogram.options import ComputeUnits, CoreMLOptions
from ssdevice.export.plan import ExportOptions, Quant
from ssdevice.export.stages import export_bundle
from ssdevice.runtime import Session
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.text.tokenizer import ChatTokenizer
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.export.models import write_adapter
from tests.runtime import tiny_bundle
from tests.runtime.sampling.promise import SAMPLERS, check_forced_drafts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "darwin", reason="these run in the interpreter"),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    options = ExportOptions(
        model=str(tiny_bundle.base_folder()),
        target="coreml",
        quant=Quant.INT8,
        out=tmp_path_factory.mktemp("coreml") / "bundle",
        adapters=((tiny_bundle.APP, tiny_bundle.adapter_folder()),),
        tree=tiny_bundle.TREE,
        context=tiny_bundle.CONTEXT,
        chunk=tiny_bundle.CHUNK,
        target_options=(CoreMLOptions(compute_units=ComputeUnits.ALL),),
        choose=True,
    )
    return export_bundle(options, lambda *_: None)


def golden(bundle: Bundle):
    return json.loads(bundle.file("golden").read_text("utf-8"))


def test_the_manifest_says_what_was_made(bundle: Bundle):
    manifest = bundle.manifest
    assert manifest.cache is CacheForm.INTERNAL
    assert list(bundle.functions) == [*FUNCTIONS, *CHOOSING]
    assert manifest.parity["counts"] == tiny_bundle.TREE.emitted
    assert any("activations are float16" in note for note in manifest.notes)
    assert any(
        "multiples of 32" in note for note in manifest.notes
    )  # a head of 8: the Neural Engine may refuse


def test_golden_texts_have_a_prompt_of_the_app(bundle: Bundle):
    assert json.loads(bundle.file("settings").read_text("utf-8"))["compute_units"] == "all"
    tokenizer = ChatTokenizer.from_bytes(
        bundle.file("tokenizer").read_bytes(), bundle.manifest.chat
    )
    prompt = tokenizer.prompt_ids(TEXTS[0], instruction=bundle.app().instruction)
    assert prompt in [text["ids"] for text in golden(bundle)["texts"]]


def test_golden_integers_are_what_the_engine_gives(bundle: Bundle):
    engine = open_engine(bundle, None, EngineOptions())
    for case in golden(bundle)["cases"]:
        conversation = engine.new_conversation()
        for call in case["prefill"]:
            conversation.length = call["length"]
            assert conversation.prefill(call["chunk"]) == call["next_root"]
            assert conversation.drafts.tolist() == call["next_drafts"]
        assert len(case["steps"]) > 3
        for step in case["steps"]:
            conversation.length = step["length"]
            conversation.drafts[:] = step["drafts"]
            assert conversation.step(step["root"]) == step["tokens"]
            assert conversation.drafts.tolist() == step["next_drafts"]
            assert len(step["tokens"]) == step["count"]


def test_golden_steps_end_at_every_depth(bundle: Bundle):
    counts = {step["count"] for case in golden(bundle)["cases"] for step in case["steps"]}
    assert counts == set(range(1, tiny_bundle.TREE.emitted + 1))


def test_speculation_changes_no_text(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    with Session.open(bundle) as session:
        fast = "".join(session.generate("abc", max_tokens=24))
        accepted = session.last.tokens
        assert "".join(session.generate("abc", max_tokens=24, speculate=False)) == fast
        assert session.last.tokens == accepted
    assert capsys.readouterr().err.count("slowly") <= 1  # once a process


@pytest.mark.parametrize("sampling", SAMPLERS, ids=range(len(SAMPLERS)))
def test_sampling_gives_the_same_answer_in_every_mode(bundle: Bundle, sampling: Sampling):
    with Session.open(bundle) as session:
        found = []
        for mode in ("plain", SPECULATIVE, ADAPTIVE):
            for _ in session.runs(
                session.prompt_ids("abc"), max_tokens=24, mode=mode, sampling=sampling
            ):
                pass
            found.append((session.last.tokens, session.last.logprobs))
        assert found[0] == found[1] == found[2]


def test_draft_layers_decode_as_plain_decoding(tmp_path):
    own = write_adapter(
        tmp_path / "own",
        tiny_bundle.base_folder(),
        Mode.LOSSLESS,
        msa_layers=0,
        adapter_rank=0,
        draft_layers=1,
    )
    options = ExportOptions(
        model=str(tiny_bundle.base_folder()),
        target="coreml",
        quant=Quant.INT8,
        out=tmp_path / "bundle",
        adapters=(("app", own),),
        tree=tiny_bundle.TREE,
        context=tiny_bundle.CONTEXT,
        chunk=tiny_bundle.CHUNK,
        choose=True,
    )
    made = export_bundle(options, lambda *_: None)
    assert made.geometry.layers == 3  # two of the model's
    driver = OracleDriver(open_engine(made, None, EngineOptions()))
    check(drive(driver, [7, 21, 3, 14, 9], perturb=False), driver, row_tolerance=2e-3)
    engine = open_engine(made, None, EngineOptions())
    assert check_forced_drafts(engine, SAMPLERS[1], exactly=True) == set(
        range(1, tiny_bundle.TREE.emitted + 1)
    )


def test_a_model_without_streams_decodes_plainly(tmp_path):
    options = ExportOptions(
        model=str(tiny_bundle.base_folder()),
        target="coreml",
        quant=Quant.FP16,
        out=tmp_path / "plain",
        context=tiny_bundle.CONTEXT,
        chunk=tiny_bundle.CHUNK,
        choose=True,
    )
    made = export_bundle(options, lambda *_: None)
    assert list(made.functions) == [PREFILL, PLAIN, VERIFY_PLAIN]
    with Session.open(made) as session:
        "".join(session.generate("abc", max_tokens=8))
        assert 1 <= len(session.last.tokens) <= 8
