"""Bundles of several apps: one base, adapters as inputs of its graphs, apps added and switched."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdevice.adapters.slots import LAYOUT_FILE, Slot, SlotKind
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import AdapterKind
from ssdevice.cli import main
from ssdevice.contract import PLAIN, PREFILL, STEP
from ssdevice.errors import InputError
from ssdevice.export.onnx.editor import CONTRIB, Editor
from ssdevice.export.onnx.exporter import WEIGHTS_FILE
from ssdevice.export.onnx.functions import add_functions
from ssdevice.export.onnx.slots import beside
from ssdevice.export.parity.products import QUANTIZED
from ssdevice.model.loading import load_hf
from ssdevice.runtime.loop import MODES
from ssdevice.runtime.onnx.engine import OnnxEngine
from ssdevice.runtime.session import Session
from tests.compiled_kernels import built
from tests.export.models import TEMPLATE, write_adapter, write_base, write_lora, write_own_tokenizer

PROMPTS = ("a b c", "d e f g h i j k l m n o p q r s t u v w")


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
        "--tree",
        "chain:2",
        "--out",
        str(out),
        "--quiet",
        *flags,
    ]


@pytest.fixture(scope="module", params=["fp32", pytest.param("int8", marks=pytest.mark.wide)])
def bundle(
    request: pytest.FixtureRequest,
    base: Path,
    with_lora: Path,
    waiting: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Bundle:
    out = tmp_path_factory.mktemp("slots") / request.param
    flags = ["--adapter", f"sql={with_lora}", "--quant", request.param]
    # In eight bits it is the LoRA that is delicate; the lossless graphs would double the time.
    flags += ["--adapter", f"exact={waiting}"] if request.param == "fp32" else ["--slots"]
    assert main(export(base, out, *flags)) == 0
    return Bundle.open(out)


@pytest.fixture
def copy(bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))


def apps_of(bundle: Bundle) -> list[str]:
    return [app.name for app in bundle.manifest.apps]


def answer(session: Session, prompt: str, mode: str = "speculative", count: int = 24) -> list[int]:
    mode = mode if STEP in session.engine.functions else "plain"
    list(session.runs(session.prompt_ids(prompt), max_tokens=count, mode=mode))
    return session.last.tokens


def test_every_app_passed_the_gate_over_one_set_of_weights(bundle: Bundle) -> None:
    manifest = bundle.manifest
    kinds = {"sql": AdapterKind.SLOT, "exact": AdapterKind.SLOT, "base": AdapterKind.BASE}
    assert {app.name: app.kind for app in manifest.apps} == {
        name: kinds[name] for name in apps_of(bundle)
    }
    for app in manifest.apps:
        assert manifest.parity[f"{app.name}.input_error"] < 1e-5
        assert manifest.parity[f"{app.name}.product_error"] < (
            1e-5 if manifest.precision == "fp32" else QUANTIZED.product / 2
        )
        assert (STEP in app.functions) == (app.name != "base")
    assert manifest.parity["sql.counts"] == bundle.geometry.tree.emitted
    limit = manifest.model.parameters * (4 if manifest.precision == "fp32" else 1.8) + 160_000
    assert manifest.files[WEIGHTS_FILE].size < limit
    graphs = [path for path in manifest.files if path.endswith(".onnx")]
    assert len(graphs) == 2 * (len(manifest.apps) + 1) and all(
        manifest.files[path].size < 400_000 for path in graphs
    )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_arm_of_every_app_gives_the_same_tokens(bundle: Bundle, prompt: str) -> None:
    with Session.open(bundle, threads=1) as session:
        for app in apps_of(bundle):
            session.use(app)
            assert len({tuple(answer(session, prompt, mode)) for mode in MODES}) == 1


def test_apps_differ_where_they_should(bundle: Bundle) -> None:
    with Session.open(bundle, threads=1) as session:
        said = {}
        for app in apps_of(bundle):
            session.use(app)
            session.instruction = ""
            said[app] = answer(session, PROMPTS[1])
    assert said.get("exact", said["base"]) == said["base"] != said["sql"]


def test_switching_opens_nothing_again_and_starts_anew(bundle: Bundle) -> None:
    with Session.open(bundle, threads=1) as session:
        fresh = answer(session, PROMPTS[0])
        session.preload()
        opened = {app: kept.engine for app, kept in session._apps.items()}
        graphs = {id(engine.session(f)) for engine in opened.values() for f in engine.functions}  # type: ignore[attr-defined]
        list(session.chat("a b", max_tokens=4))
        for _ in range(3):
            for app in apps_of(bundle):
                session.use(app)
                assert (
                    session.engine is opened[app]
                    and session._conversation.length == 0
                    and not session.messages
                )
                answer(session, PROMPTS[1], count=6)
        session.use("sql")
        assert answer(session, PROMPTS[0]) == fresh
        assert {id(e.session(f)) for e in opened.values() for f in e.functions} == graphs  # type: ignore[attr-defined]
        caches = {id(kept.cache.memory) for kept in session._apps.values()}  # type: ignore[attr-defined]
        assert len(caches) == 1


def test_an_answer_ends_when_the_app_is_switched(bundle: Bundle) -> None:
    with Session.open(bundle, threads=1) as session:
        runs = session.runs(session.prompt_ids(PROMPTS[0]), max_tokens=20)
        next(runs)
        session.use("base")
        with pytest.raises(InputError, match="ended by"):
            next(runs)
        assert session._conversation.text[: session._conversation.length] == []


def test_sessions_share_the_base_and_the_adapters(bundle: Bundle) -> None:
    with (
        Session.open(bundle, app="sql", threads=1) as one,
        Session.open(bundle, app="sql", threads=1) as two,
    ):
        expected = answer(one, PROMPTS[0])
        assert isinstance(one.engine, OnnxEngine) and isinstance(two.engine, OnnxEngine)
        assert one.engine.session(STEP) is two.engine.session(STEP)
        assert one.engine.adapter is two.engine.adapter
        with Session.open(bundle, app="base", threads=1) as three:
            answer(three, PROMPTS[0])
            assert isinstance(three.engine, OnnxEngine) and three.engine.shared is one.engine.shared
        assert answer(two, PROMPTS[0]) == expected == answer(one, PROMPTS[0])
        shared = one.engine.shared
    assert shared is not None and one.engine.shared is None


def test_an_app_is_added_removed_and_is_what_an_export_makes_it(
    copy: Path, bundle: Bundle, with_lora: Path, plain_lora: Path
) -> None:
    assert main(["bundle", "add-app", str(copy), f"again={with_lora}", "--quiet"]) == 0
    assert (
        main(
            [
                "bundle",
                "add-app",
                str(copy),
                f"peft={plain_lora}",
                "--adapter-precision",
                "fp16",
                "--quiet",
            ]
        )
        == 0
    )
    made = Bundle.open(copy)
    one, two = (made.manifest.files[made.app(name).files[0]].sha256 for name in ("sql", "again"))
    assert (
        one == two and made.app("again").instruction == "Do it." and made.app("peft").mode is None
    )
    with Session.open(made, app="again", threads=1) as session:
        added = answer(session, PROMPTS[0])
        session.use("peft")
        assert session.engine.functions == {PREFILL, PLAIN}
        answer(session, PROMPTS[0])
    with Session.open(bundle, app="sql", threads=1) as session:
        assert answer(session, PROMPTS[0]) == added
    assert main(["bundle", "remove-app", str(copy), "again", "--quiet"]) == 0
    assert apps_of(Bundle.open(copy)) == [*apps_of(bundle), "peft"]


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_an_app_takes_less_room_in_half_and_in_bytes(
    copy: Path, with_lora: Path, precision: str
) -> None:
    assert (
        main(
            [
                "bundle",
                "add-app",
                str(copy),
                f"{precision}={with_lora}",
                "--adapter-precision",
                precision,
            ]
        )
        == 0
    )
    assert main(["verify", str(copy), "--app", precision, "--limit", "2", "--quiet"]) == 0
    made = Bundle.open(copy)
    small, whole = (
        made.manifest.files[made.app(name).files[0]].size for name in (precision, "sql")
    )
    assert small < whole


def greedy(base: Path, adapter: Path, ids: Sequence[int], count: int) -> list[int]:
    """What PEFT itself says with an adapter."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_hf(base), str(adapter)).eval()
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize("bundle", ["fp32"], indirect=True)  # PEFT does not quantize
@pytest.mark.parametrize("kind", ["with_lora", "plain_lora"])
def test_adapters_say_what_they_say_in_peft(
    copy: Path, base: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    adapter = request.getfixturevalue(kind)
    assert main(["bundle", "add-app", str(copy), f"mine={adapter}", "--quiet"]) == 0
    with Session.open(copy, app="mine", threads=1) as session:
        ids = session.prompt_ids(PROMPTS[1])
        found = answer(session, PROMPTS[1], count=12)
    assert found == greedy(base, adapter, ids, 12)[: len(found)]


def test_apps_are_added_without_torch(copy: Path, plain_lora: Path, repository: Path) -> None:
    code = (
        "import sys; from ssdevice.cli import main; "
        f"code = main(['bundle', 'add-app', {str(copy)!r}, 'peft={plain_lora}']); "
        "assert code == 0; heavy = {'torch', 'transformers', 'peft', 'onnx'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=repository, check=True, capture_output=True, timeout=120
    )


def test_what_does_not_fit_is_refused_and_changes_nothing(
    copy: Path,
    base: Path,
    adapter: Path,
    lossless: Path,
    plain_lora: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = Bundle.open(copy).manifest

    def refuse(folder: Path, message: str) -> None:
        assert main(["bundle", "add-app", str(copy), f"new={folder}"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1

    def broken(folder: Path, file: str, name: str, change: torch.Tensor | None) -> Path:
        out = Path(shutil.copytree(folder, tmp_path / f"broken{len(list(tmp_path.iterdir()))}"))
        tensors = load_file(str(out / file))
        tensors.pop(name)
        if change is not None:
            tensors[name] = change
        save_file(tensors, str(out / file))
        return out

    other = write_base(tmp_path / "other", initializer_range=0.2)
    refuse(write_adapter(tmp_path / "foreign", other), "another base: its sha256")
    refuse(write_adapter(tmp_path / "short", base, gamma=1), "γ = 1 streams")
    refuse(
        write_adapter(tmp_path / "low", base, msa_layers=1),
        "no graphs for shared streams with N_s = 1",
    )
    refuse(tmp_path / "nowhere", "no such folder")
    wordy = write_adapter(tmp_path / "wordy", base)
    settings = json.loads((wordy / "streams.json").read_text("utf-8"))
    (wordy / "streams.json").write_text(
        json.dumps({**settings, "instruction": "a " * 999}), "utf-8"
    )
    refuse(wordy, "the instruction of app 'new' and the chat template take 100")
    refuse(
        broken(adapter, "streams.safetensors", "identifiers", torch.full((3, 128), torch.nan)),
        "not finite",
    )
    refuse(
        broken(adapter, "streams.safetensors", "identifiers", torch.zeros(3, 64)),
        "identifiers have shape",
    )
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    refuse(
        broken(plain_lora, "adapter_model.safetensors", key, torch.zeros(4, 99)),
        "have shapes [4, 99]",
    )
    refuse(broken(plain_lora, "adapter_model.safetensors", key, torch.zeros(5, 128)), "have shapes")
    refuse(broken(plain_lora, "adapter_model.safetensors", key, None), "only one of its factors")
    head = write_lora(tmp_path / "head", base, target_modules=["lm_head"])
    refuse(head, "lm_head")
    speaks = Path(shutil.copytree(plain_lora, tmp_path / "speaks"))
    refuse(
        write_own_tokenizer(speaks, base, "a" + TEMPLATE),
        "need different chat templates: export the app apart",
    )
    assert (
        main(
            ["bundle", "add-app", str(copy), f"new={write_own_tokenizer(speaks, base)}", "--quiet"]
        )
        == 0
    )
    assert main(["bundle", "remove-app", str(copy), "new", "--quiet"]) == 0
    dora = write_lora(tmp_path / "dora", base, use_dora=True)
    refuse(dora, "use_dora")
    assert main(["bundle", "add-app", str(copy), f"SQL={adapter}"]) == 2
    assert "remove it first" in capsys.readouterr().err
    assert Bundle.open(copy).manifest == before


def test_an_adapter_without_a_slots_tensors_is_not_run(
    copy: Path, plain_lora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that a manifest vouches for, but of another kind: a LoRA without streams in an app
    that has them.
    """
    assert main(["bundle", "add-app", str(copy), f"peft={plain_lora}", "--quiet"]) == 0
    document = json.loads((copy / "manifest.json").read_text("utf-8"))
    sql, peft = (f"adapters/{name}/adapter.onnx_adapter" for name in ("sql", "peft"))
    shutil.copy(copy / peft, copy / sql)
    document["files"][sql] = document["files"][peft]
    (copy / "manifest.json").write_text(json.dumps(document))
    assert main(["run", str(copy), "--app", "sql", "--prompt", "a b", "--quiet"]) == 2
    assert "needs" in capsys.readouterr().err


@pytest.mark.wide
def test_one_adapter_stands_apart_if_asked(base: Path, plain_lora: Path, tmp_path: Path) -> None:
    assert (
        main(
            export(
                base,
                tmp_path / "b",
                "--quant",
                "fp32",
                "--dry-run",
                "--slots",
                "--adapter",
                f"a={plain_lora}",
            )
        )
        == 2
    )
    flags = ("--adapter", f"a={plain_lora}", "--slots", "--quant", "int4")
    arguments = [
        flag for flag in export(base, tmp_path / "b", *flags) if flag not in ("--tree", "chain:2")
    ]
    assert main(arguments) == 0
    made = Bundle.open(tmp_path / "b")
    assert (
        made.geometry.gamma == 0
        and made.app("a").kind is AdapterKind.SLOT
        and made.file(LAYOUT_FILE).is_file()
    )


ENGINES = ["functions", "native", pytest.param("portable", marks=pytest.mark.wide)]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("ranks", [(4,), (32, 0, 7), (128, 64), (0,)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_among_others_and_is_what_its_factors_say(
    ranks: tuple[int, ...], threads: int, kind: str
) -> None:
    inputs = 300
    rows = 5
    outputs = tuple(40 + 300 * i for i in range(len(ranks)))
    slot = Slot(
        SlotKind.LORA, tuple(f"l.{i}" for i in range(len(ranks))), inputs, outputs, int8=True
    )
    draw = np.random.default_rng(0)
    feeds = {
        slot.down.name: draw.integers(-127, 128, (inputs, sum(ranks))).astype(np.int8),
        slot.down_scale.name: draw.random(sum(ranks)).astype(np.float32),
        slot.ranks.name: np.array(ranks, np.int64),
    }
    for spec, rank, size in zip(slot.ups, ranks, outputs, strict=True):
        feeds[spec.name] = draw.standard_normal((rank, size)).astype(np.float32)
    x = draw.standard_normal((1, rows, inputs)).astype(np.float32)
    x[0, 1] = 0
    base = draw.standard_normal((1, rows, sum(outputs))).astype(np.float32)
    library = None if kind == "functions" else built(kind)
    whole = product(slot, rows, threads, {**feeds, "x": x, "base": base}, library)
    for row in range(rows):
        only = slice(row, row + 1)
        alone = product(
            slot, 1, threads, {**feeds, "x": x[:, only], "base": base[:, only]}, library
        )
        np.testing.assert_array_equal(alone[0, 0], whole[0, row])

    if (
        kind == "functions"
    ):  # whose sums of large codes saturate in ONNX Runtime where a CPU has no VNNI
        feeds[slot.down.name] //= 2
        whole = product(slot, rows, threads, {**feeds, "x": x, "base": base}, library)
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127)
    codes = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0))
    h = codes.astype(np.float64) @ feeds[slot.down.name] * feeds[slot.down_scale.name] * scale
    ups = [feeds[spec.name].astype(np.float64) for spec in slot.ups]
    pieces = zip(np.split(h, np.cumsum(ranks)[:-1], axis=-1), ups, strict=True)
    expected = base + np.concatenate([piece @ up for piece, up in pieces], axis=-1)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    if kind == "native":
        np.testing.assert_array_equal(
            whole, product(slot, rows, 3 - threads, {**feeds, "x": x, "base": base}, library)
        )
    if kind == "portable":
        native = product(slot, rows, threads, {**feeds, "x": x, "base": base}, built("native"))
        np.testing.assert_array_equal(whole, native)


def product(
    slot: Slot,
    rows: int,
    threads: int,
    feeds: dict[str, np.ndarray],
    library: Path | None,  # type: ignore[type-arg]
) -> np.ndarray:  # type: ignore[type-arg]
    """What the slot beside a product ``base`` makes of it."""
    x, base = (
        ir.Value(name=name, shape=ir.Shape([1, rows, width]), type=ir.TensorType(ir.DataType.FLOAT))
        for name, width in (("x", slot.inputs), ("base", sum(slot.outputs)))
    )
    graph = ir.Graph(
        [x, base], [], nodes=[ir.node("Identity", [x])], opset_imports={"": 23, CONTRIB: 1}
    )
    edit = Editor(ir.Model(graph, ir_version=11))
    last = graph[-1]
    out = beside(edit, slot, base, x, last, exact=True)
    graph.outputs.append(out)
    graph.remove(last)
    add_functions(edit.model, alone=rows == 1)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(ir.to_proto(edit.model).SerializeToString(), options)
    names = {value.name for value in session.get_inputs()}
    return np.asarray(
        session.run(None, {name: value for name, value in feeds.items() if name in names})[0]
    )
