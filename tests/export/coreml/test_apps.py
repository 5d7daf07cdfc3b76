"""Several apps as functions of one package: the base once, LoRA beside it in float16, each app with
its own answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
torch = pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.bundle.folder import Bundle  # noqa: E402
from ssdevice.bundle.manifest import AdapterKind  # noqa: E402
from ssdevice.config import Mode, StreamConfig  # noqa: E402
from ssdevice.contract import PLAIN, PREFILL, STEP  # noqa: E402
from ssdevice.export.plan import ExportOptions, Quant  # noqa: E402
from ssdevice.export.stages import export_bundle  # noqa: E402
from ssdevice.mil.reader import Package  # noqa: E402
from ssdevice.mil.schema import BlobRef  # noqa: E402
from ssdevice.runtime import Session  # noqa: E402
from ssdevice.tree import Tree  # noqa: E402
from tests.runtime.scripted import TEMPLATE, make_tokenizer  # noqa: E402

pytestmark = [
    pytest.mark.lowering,
    pytest.mark.skipif(sys.platform == "darwin", reason="these run in the interpreter"),
]

TREE = Tree.of([[0], [1], [0, 0]])
CONTEXT = 48
CHUNK = 8
RANK = 256
WIDTH = 128
APPS = {"letters": Mode.SHARED, "step.plain": Mode.SHARED, "untouched": Mode.LOSSLESS}
"""Names with characters that functions may not have, and one that could meet another function's
name.
"""
GROWTH = 1.1
"""What an app may add, by the bytes of its adapter."""


def write_base(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.tokenizer.get_vocab_size(),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def write_adapter(folder: Path, base: Path, app: str, mode: Mode) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig

    from ssdevice.adapters.settings import AdapterSettings, BaseIdentity
    from ssdevice.model.adapter import write_streams
    from ssdevice.model.loading import build, load_hf

    torch.manual_seed(len(app))
    hf = load_hf(base)
    config = StreamConfig(
        mode,
        TREE.depth,
        1,
        token_rank=RANK,
        adapter_rank=RANK,
        lora_rank=RANK if mode is Mode.SHARED else 0,
        follow_rank=RANK if mode is Mode.LOSSLESS else 0,
    )
    streams = build(hf, config, CONTEXT).streams
    assert streams is not None
    identity = BaseIdentity.of(base, AutoConfig.from_pretrained(base))
    with torch.no_grad():
        for value in streams.parameters():
            value.copy_(torch.randn_like(value) * 0.1)
    write_streams(folder, streams, AdapterSettings(app, config, identity, f"{app}.", {}))
    if mode is Mode.SHARED:
        lora = get_peft_model(
            load_hf(base), LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
        )
        with torch.no_grad():
            for name, value in lora.named_parameters():
                if "lora_" in name:
                    value.copy_(torch.randn_like(value) * 0.03)
        lora.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("apps")
    base = write_base(folder / "base")
    options = ExportOptions(
        model=str(base),
        target="coreml",
        quant=Quant.INT8,
        out=folder / "bundle",
        adapters=tuple(
            (app, write_adapter(folder / app, base, app, mode)) for app, mode in APPS.items()
        ),
        tree=TREE,
        context=CONTEXT,
        chunk=CHUNK,
    )
    return export_bundle(options, lambda *_: None)


@pytest.fixture(scope="module")
def package(bundle: Bundle) -> Package:
    return Package.open(bundle.file("model"))


def blobs(package: Package, function: str) -> dict[BlobRef, int]:
    """Places in the weight file that a function reads, and their sizes."""
    return package.places(package.function(function))


def test_every_app_has_functions_of_its_own_and_the_base_is_one(bundle: Bundle, package: Package):
    apps = {app.name: app for app in bundle.manifest.apps}
    assert set(apps) == {*APPS, "base"}
    assert apps["base"].kind is AdapterKind.BASE
    assert set(apps["base"].functions) == {PREFILL, PLAIN}
    names = {app: set(found.functions.values()) for app, found in apps.items()}
    assert set().union(*names.values()) == set(package.functions)
    assert not names["letters"] & names["step.plain"]
    assert names["untouched"] & names["base"] == {PLAIN}  # lossless: its main rows are the base's


def test_base_weights_are_stored_once(bundle: Bundle, package: Package):
    apps = {app.name: app.functions for app in bundle.manifest.apps}
    whole: dict[str, dict[BlobRef, int]] = {}
    for app, names in apps.items():
        whole[app] = {}
        for name in names.values():
            whole[app] |= blobs(package, name)
    shared = whole["letters"].keys() & whole["step.plain"].keys() & whole["untouched"].keys()
    matrices = {place for place, size in whole["base"].items() if size >= WIDTH * WIDTH // 2}
    assert matrices and matrices <= shared


def test_an_app_costs_its_adapter(bundle: Bundle, package: Package):
    notes = {
        app: note
        for app in APPS
        for note in bundle.manifest.notes
        if note.startswith(f"app {app} adds")
    }
    for app, note in notes.items():
        added, adapter = (int(word) for word in (note.split()[3], note.split()[-4]))
        assert added < GROWTH * adapter, note
        half = 2 * sum(np.prod(value.shape) for value in _tensors(bundle.folder.parent / app))
        assert adapter == half
    assert set(notes) == set(APPS)


def _tensors(folder: Path) -> list[np.ndarray]:
    from safetensors.numpy import load_file

    return [
        value for file in folder.glob("*.safetensors") for value in load_file(str(file)).values()
    ]


def test_lora_is_not_quantized(bundle: Bundle, package: Package):
    step = package.function(bundle.app("letters").functions[STEP])
    weights = [
        operation.inputs["weight"][0] for operation in step.operations if operation.kind == "linear"
    ]
    narrow = [name for name in weights if RANK in step.types[name].shape]
    assert (
        len(narrow) == (2 + 1) * 7 * 2 + 2
    )  # layers of main rows and of streams x linears x (down, up); g
    assert {step.makers[name] for name in narrow} == {"const"}


def test_apps_answer_differently_and_each_as_without_speculation(bundle: Bundle):
    answers = {}
    with Session.open(bundle) as session:
        for app in ("letters", "step.plain", "untouched", "base"):
            session.use(app)
            ids = session.tokenizer.encode("abcabc")
            for mode in ("speculative", "plain") if app != "base" else ("plain",):
                list(session.runs(ids, max_tokens=20, mode=mode))
                assert answers.setdefault(app, session.last.tokens) == session.last.tokens
    assert answers["untouched"] == answers["base"]
    assert len({tuple(tokens) for tokens in answers.values()}) == 3


def test_golden_integers_know_every_app(bundle: Bundle):
    golden = json.loads(bundle.file("golden").read_text("utf-8"))
    assert {case["app"] for case in golden["cases"]} == {*APPS, "base"}
