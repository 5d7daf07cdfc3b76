"""The ONNX engine on exported graphs of a tiny model: it computes what torch computes, whatever
lies in free rows.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
from pathlib import Path
from weakref import ref

import numpy as np
import pytest

from ssdevice.bench.equality import Asked
from ssdevice.bench.modes import FORCED, compare_modes
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import Precision
from ssdevice.contract import FUNCTIONS
from ssdevice.errors import BundleError, InputError
from ssdevice.export.onnx.graphs import LogitsEngine
from ssdevice.model.loading import load
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.runtime.generation import Reason
from ssdevice.runtime.loop import MODES, prefill
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.onnx.cache import BUCKET, LANES, RowCache
from ssdevice.runtime.onnx.engine import BINDINGS, OnnxCache, OnnxEngine
from ssdevice.runtime.session import Session
from tests.model.reference import Reference
from tests.runtime import tiny_bundle as tiny
from tests.runtime.scripted import make_geometry

PROMPTS = ["a", "what is the weather", "x" * 70]
ONE_THREAD = EngineOptions(threads=1)


@pytest.fixture(scope="module", params=["fp32", "int8"])
def bundle(request: pytest.FixtureRequest) -> Bundle:
    return tiny.tiny_bundle(request.param)


@pytest.fixture(scope="module")
def session(bundle: Bundle) -> Session:
    return Session.open(bundle, options=ONE_THREAD)


def cache_of(conversation: Conversation) -> OnnxCache:
    assert isinstance(conversation.cache, OnnxCache)
    return conversation.cache


def test_row_cache_commits_all_layers_at_once() -> None:
    cache = RowCache(make_geometry(tiny.TREE, context=200), np.float32)
    rows = np.arange(2 * 4, dtype=np.float32).reshape(2, 4, 1)
    cache.commit(3, rows, 2)
    assert cache.array[:, 3:5].tolist() == rows[:, :2].tolist()
    assert not cache.array[:, 5:].any() and not cache.array[:, :3].any()
    assert np.shares_memory(cache.prefix(1, 10), cache.array)


@pytest.mark.parametrize(
    ("length", "rows"), [(0, 32), (1, 33), (32, 32), (33, 65), (50, 66), (220, 220)]
)
def test_visible_rows_are_few_sizes_that_keep_every_row_in_its_lane(length: int, rows: int) -> None:
    cache = RowCache(make_geometry(tiny.TREE, context=220), np.float32)
    assert cache.capacity == 224
    assert cache.visible(length) == rows
    sizes = {n: cache.visible(n) for n in range(1, 221)}
    assert all(n <= size <= cache.capacity and (size - n) % LANES == 0 for n, size in sizes.items())
    assert len(set(sizes.values())) <= cache.capacity // BUCKET * LANES + LANES


@pytest.mark.parametrize(("length", "rows"), [(0, 128), (128, 128), (129, 224), (224, 224)])
def test_an_attention_without_lanes_sees_fewer_sizes(length: int, rows: int) -> None:
    assert (
        RowCache(make_geometry(tiny.TREE, context=220), np.float32).visible(length, lanes=1) == rows
    )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_all_decoding_modes_agree_up_to_a_full_context(session: Session, prompt: str) -> None:
    answers = set()
    for mode in MODES:
        runs = list(session.runs(session.prompt_ids(prompt), max_tokens=1000, mode=mode))
        assert sum(len(run.tokens) for run in runs) == len(session.last.tokens)
        assert session.last.reason in (Reason.STOP, Reason.CONTEXT)
        answers.add((tuple(session.last.tokens), session.last.reason))
    assert len(answers) == 1


@pytest.mark.parametrize("prompt", PROMPTS)
def test_fp32_tokens_are_those_of_torch(prompt: str) -> None:
    bundle = tiny.tiny_bundle("fp32")
    model = load(tiny.base_folder(), tiny.adapter_folder(), tiny.CONTEXT).model
    reference = Reference(
        model, tiny.TREE, tiny.TREE.width, bundle.manifest.schedule, tiny.CONTEXT, tiny.CHUNK
    )
    with Session.open(bundle, options=ONE_THREAD) as session:
        ids = session.prompt_ids(prompt)
        list(session.runs(ids, max_tokens=40))
        expected = reference.speculative(ids, 40, session.tokenizer.stop_ids)
        assert session.last.tokens == expected.tokens
        assert session.last.accepted == expected.steps


def test_forced_drafts_end_at_every_node_and_change_nothing(
    bundle: Bundle, session: Session
) -> None:
    shown = LogitsEngine.of(bundle, None, ONE_THREAD)
    prompts = [session.prompt_ids(prompt) for prompt in PROMPTS]
    result = compare_modes(
        session.engine, shown, Asked(prompts, (), 60, bundle.manifest.precision, lambda *_: None)
    )
    assert result.modes == ["plain_step", "speculative", FORCED]
    assert result.nodes_ended == set(range(tiny.TREE.size))
    assert result.differences == [] and result.faults() == []
    assert result.largest_change is not None and result.largest_change < (
        1e-4 if bundle.manifest.precision is Precision.FP32 else 0.1
    )


def test_rows_that_are_not_committed_are_never_seen(session: Session) -> None:
    ids = session.prompt_ids("what is the weather")
    results = []
    for garbage in (0.0, 1e4, -1e4):
        conversation = session.engine.new_conversation()
        cache_of(conversation).memory.array[:] = garbage
        root = prefill(conversation, ids)
        conversation.drafts[:] = 7
        results.append(
            (
                root,
                conversation.step(root),
                conversation.drafts.tolist(),
                conversation.step_plain(root),
            )
        )
    assert results[0] == results[1] == results[2]


def test_wrong_drafts_change_no_token(session: Session) -> None:
    ids = session.prompt_ids("hello")
    firsts = set()
    random = np.random.default_rng(0)
    for _ in range(10):
        conversation = session.engine.new_conversation()
        root = prefill(conversation, ids)
        conversation.drafts[:] = random.integers(
            0, session.engine.geometry.vocab, conversation.drafts.shape
        )
        firsts.add(conversation.step(root)[0])
    assert len(firsts) == 1


def test_conversations_of_one_engine_are_independent(session: Session) -> None:
    one = session.engine.new_conversation()
    two = session.engine.new_conversation()
    first = prefill(one, session.prompt_ids("hello"))
    prefill(two, session.prompt_ids("something else"))
    alone = session.engine.new_conversation()
    assert prefill(alone, session.prompt_ids("hello")) == first
    assert one.step(first) == alone.step(first)


def test_graphs_are_opened_when_they_are_first_called(bundle: Bundle) -> None:
    engine = open_engine(bundle, None, ONE_THREAD)
    assert isinstance(engine, OnnxEngine)
    conversation = engine.new_conversation()
    assert not engine._sessions
    root = prefill(conversation, [5, 6, 7])
    conversation.step(root)
    assert engine._sessions.keys() == {"prefill", "step"}


def test_a_profile_names_operators() -> None:
    bundle = tiny.tiny_bundle("fp32")
    with Session.open(bundle, options=EngineOptions(threads=1, profile=True)) as session:
        list(session.runs(session.prompt_ids("hello"), max_tokens=5))
        profile = session.engine.profile()
    assert set(profile) == {"prefill", "step"}
    assert all(kernel.microseconds >= 0 for found in profile.values() for kernel in found)
    assert any(
        "MatMul" in kernel.operator or "Gemm" in kernel.operator for kernel in profile["step"]
    )


def test_apps_are_chosen_by_name(bundle: Bundle) -> None:
    with Session.open(bundle, app=tiny.APP, options=ONE_THREAD) as session:
        expected = "".join(session.generate("hello", max_tokens=9))
        session.use(tiny.APP)
        assert "".join(session.generate("hello", max_tokens=9)) == expected
        with pytest.raises(InputError, match="no app 'sql'; it has letters"):
            session.use("sql")
        assert "".join(session.generate("hello", max_tokens=9)) == expected
    with pytest.raises(InputError, match="no app 'sql'"):
        Session.open(bundle, app="sql")


def test_a_file_that_is_no_graph_is_refused(bundle: Bundle) -> None:
    files = {function: bundle.file("tokenizer") for function in FUNCTIONS}
    engine = OnnxEngine(files, bundle.geometry, "float32", ONE_THREAD)
    with pytest.raises(BundleError, match="tokenizer.json: ONNX Runtime cannot load it"):
        prefill(engine.new_conversation(), [5])


def test_a_graph_with_other_tensors_is_refused(bundle: Bundle) -> None:
    files = {function: bundle.file("step_plain") for function in FUNCTIONS}
    engine = OnnxEngine(files, bundle.geometry, "float32", ONE_THREAD)
    with pytest.raises(BundleError, match="prefill has no tensor"):
        prefill(engine.new_conversation(), [5])


def test_a_graph_of_other_shapes_than_the_manifest_is_refused() -> None:
    bundle = tiny.tiny_bundle("fp32")
    geometry = dataclasses.replace(bundle.geometry, chunk=bundle.geometry.chunk * 2)
    files = {name: bundle.file(name) for name in bundle.functions}
    engine = OnnxEngine(files, geometry, "float32", ONE_THREAD)
    with pytest.raises(
        BundleError,
        match=r"prefill has 'chunk' as tensor\(int32\) \[8\], the manifest says int32 \[16\]",
    ):
        engine.session("prefill")
    with pytest.raises(InputError, match="no memory for a KV cache"):
        RowCache(
            dataclasses.replace(
                geometry, layers=1024, kv_heads=4096, head_dim=8192, context=1 << 20
            ),
            np.float32,
        )


@pytest.mark.parametrize("mode", MODES)
def test_bindings_are_bounded(session: Session, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdevice.runtime.onnx.engine.BINDINGS", 3)
    expected = list(session.runs(session.prompt_ids("hello"), max_tokens=60, mode=mode))
    with Session.open(session.bundle, options=ONE_THREAD) as other:
        runs = list(other.runs(session.prompt_ids("hello"), max_tokens=60, mode=mode))
        assert [run.tokens for run in runs] == [run.tokens for run in expected]
        calls = cache_of(other._conversation).calls
        assert all(len(call._bindings) <= 3 for call in calls.values()) and BINDINGS > 3


def test_a_closed_engine_gives_its_memory_back_and_says_so() -> None:
    session = Session.open(tiny.tiny_bundle("fp32"), options=EngineOptions(threads=1, profile=True))
    list(session.runs([5, 6, 7], max_tokens=5))
    graph = ref(session.engine.session("step"))
    folder = Path(session.engine._profiles.name)
    assert folder.is_dir()
    session.close()
    session.close()
    gc.collect()
    assert graph() is None and not folder.exists()
    with pytest.raises(InputError, match="closed"):
        list(session.runs([5, 6, 7]))


def test_a_graph_of_a_bundle_that_was_replaced_meanwhile_is_not_opened(
    bundle: Bundle, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle.folder, folder)
    with Session.open(folder, options=ONE_THREAD) as session:
        list(session.runs(session.prompt_ids("hello"), max_tokens=3, mode="plain"))
        again = tmp_path / "again"
        shutil.copytree(folder, again)
        shutil.rmtree(folder)
        again.rename(folder)
        with pytest.raises(BundleError, match="was replaced while it was in use"):
            list(session.runs(session.prompt_ids("hello"), max_tokens=3))


def test_a_user_without_a_home_runs_bundles_without_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (kernels.FOLDER, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert kernels.library() is None
    with pytest.raises(InputError, match="no home directory"):
        kernels.build()
