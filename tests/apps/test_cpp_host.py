"""The C++ host: the tokens of Python's session, and one line about what it cannot run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest

from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import CacheDtype
from ssdevice.contract import ROWS
from ssdevice.errors import BundleError
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.phrases import LARGEST
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session
from tests.apps.cpp_host import build as host_build
from tests.bundle.optional import leave_out_defaults
from tests.compiled_kernels import built
from tests.fuzz import host as fuzz
from tests.fuzz.mutator import rehash
from tests.once import made_once
from tests.runtime import tiny_bundle as tiny
from tests.vectors.sampling import FILE as VECTORS
from tests.vectors.sessions import FILE as SESSIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "apps" / "cpp_host"
pytestmark = pytest.mark.skipif(bool(host_build.missing()), reason=host_build.missing())
MODELS = ROOT / "models"
PROMPTS = 30
Prompts = Sequence[Sequence[int]]


def run(
    folder: Path, prompts: str, *options: str, program: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [str(program or host_build.host()), str(folder), "--threads", "1", *options]
    return subprocess.run(command, input=prompts, capture_output=True, text=True)


def lines(rows: Prompts) -> str:
    return "".join(" ".join(map(str, row)) + "\n" for row in rows)


MODES = (
    ("speculative", "--speculative"),
    ("plain", "--plain"),
    ("plain_step", "--plain-step"),
    ("adaptive", ""),
)
"""Python's decoding modes, and the options of the host; when the last one makes steps depends on
what they take.
"""


def compare(
    bundle: Bundle,
    prompts: Callable[[Session], Prompts],
    max_tokens: int,
    with_kernels: bool,
    sampling: Sampling | None = None,
) -> None:
    """Compare the host with a session of a bundle, in every mode."""
    asked = options_of(sampling) if sampling else []
    with Session.open(bundle, options=EngineOptions(threads=1, kernels=with_kernels)) as session:
        assert (session.engine.kernels is not None) is with_kernels
        given = prompts(session)
        for mode, option in MODES:
            if sampling and mode == "plain_step":
                continue
            expected = []
            emitted = 0
            steps = 0
            for ids in given:
                list(session.runs(ids, max_tokens=max_tokens, mode=mode, sampling=sampling))
                expected.append(session.last.tokens)
                emitted += sum(session.last.accepted)
                steps += session.last.steps
            options = [
                "--max-tokens",
                str(max_tokens),
                *option.split(),
                *([] if with_kernels else ["--no-kernels"]),
            ]
            options += asked
            done = run(bundle.folder, lines(given), *options)
            assert (done.returncode, done.stdout) == (0, lines(expected)), done.stderr
            speed, _, per_call, *_ = done.stderr.split()
            assert float(speed) > 0
            if mode == "plain" or (mode == "speculative" and session.streams):
                assert float(per_call) == pytest.approx(emitted / steps, rel=1e-4)


def options_of(sampling: Sampling) -> list[str]:
    """The options of the host that ask for it."""
    asked = [
        f"--logit-bias={token}={bias}".split("=", 1) for token, bias in sampling.logit_bias.items()
    ]
    for each in fields(Sampling):
        value = getattr(sampling, each.name)
        if isinstance(value, (int, float)) and value != each.default:
            asked.append([f"--{each.name.replace('_', '-')}", str(value)])
    return list(chain(*asked))


@pytest.fixture(params=[True, False], ids=["kernels", "no-kernels"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether both hosts use the kernels."""
    monkeypatch.setattr(kernels, "library", lambda: built("native"))
    return bool(request.param)


@pytest.mark.parametrize(("quant", "dtype"), [("int8", CacheDtype.FP16), ("fp32", CacheDtype.FP32)])
@pytest.mark.parametrize("max_tokens", [2, 40])
def test_tokens_are_those_of_python(
    max_tokens: int, quant: str, dtype: CacheDtype, with_kernels: bool
) -> None:
    def prompts(session: Session) -> Prompts:
        geometry = session.engine.geometry
        random = Random(0)
        sizes = [1, geometry.chunk, geometry.chunk + 1, geometry.context - 1, geometry.context]
        while len(sizes) < PROMPTS:
            sizes.append(random.randint(1, geometry.context))
        return [random.choices(range(1, geometry.vocab), k=size) for size in sizes]

    bundle = tiny.tiny_bundle(quant)
    assert bundle.manifest.cache_dtype is dtype
    compare(bundle, prompts, max_tokens, with_kernels)


SAMPLERS = (
    Sampling(temperature=0.8, seed=(1 << 64) - 1),
    Sampling(temperature=1.2, top_p=0.9, typical_p=0.9, repetition_penalty=1.2, seed=3),
    Sampling(temperature=0.7, top_k=5, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
        logit_bias={5: 3.0, 7: -3.5, 0: 9.0},
        min_new_tokens=4,
    ),
)


@pytest.mark.parametrize("sampling", SAMPLERS, ids=range(len(SAMPLERS)))
@pytest.mark.parametrize("streams", [True, False], ids=["streams", "lookup"])
def test_sampled_tokens_are_those_of_python(
    sampling: Sampling, streams: bool, with_kernels: bool
) -> None:
    bundle = tiny.tiny_bundle("int8", streams, repeats=0 if streams else 3, choose=True)
    prompts = [
        [5],
        [1, 2, 3, 4] * 4,
        [7, 5, 3],
        [2] * 9,
        [9] * (tiny.CONTEXT - 3),
        [9] * tiny.CONTEXT,
    ]
    compare(bundle, lambda _: prompts, 40, with_kernels, sampling)


def test_a_bundle_for_sampling_decodes_greedily_without_options(with_kernels: bool) -> None:
    compare(tiny.tiny_bundle("int8", choose=True), lambda _: [[1, 2, 3], [7]], 20, with_kernels)


@pytest.mark.parametrize("file", [VECTORS, SESSIONS], ids=["choices", "sessions"])
def test_answers_are_those_of_the_test_vectors(file: Path) -> None:
    done = subprocess.run([host_build.vectors(), file], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("0 of "), (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0, expected 0 to 100"),
        (["--temperature", "1e-7"], "temperature is 1e-07, expected 0 (greedy), or 1e-6 to 100"),
        (["--temperature", "nan"], "temperature is"),
        (["--temperature", "warm"], '--temperature is "warm", expected a number'),
        (["--temperature", "1", "--top-p", "0"], "top_p is 0.0, expected above 0, at most 1"),
        (["--temperature", "1", "--seed", str(1 << 64)], f"from 0 to {(1 << 64) - 1}"),
        (["--temperature", "1", "--seed", "-1"], "--seed is"),
        (["--temperature", "1", "--top-k", "2.5"], '--top-k is "2.5", expected a whole number'),
        (
            ["--seed", "3", "--temperature", "0"],
            "--seed has no effect: --temperature 0 chooses the likeliest token",
        ),
        (["--temperature", "0", "--sample"], "--sample has no effect: --temperature 0"),
        (
            ["--sample", "--plain-step"],
            "--plain-step takes the graph's own tokens; with sampling choose --plain",
        ),
        (["--logit-bias", "5"], '--logit-bias is "5", expected ID=X'),
        (["--logit-bias", "5=x"], "expected a number"),
        (["--logit-bias", "99999=1"], "token 99999 is not one of the model's"),
        (["--min-new-tokens"], "expected BUNDLE [--plain"),
        (["--logit-bias=1=2"], "expected BUNDLE [--plain"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_sampled_is_one_line(options: list[str], message: str) -> None:
    bundle = tiny.tiny_bundle("int8", choose=True)
    refused(run(bundle.folder, "1 2 3\n", *options), message)


def test_a_request_that_forbids_every_token_is_one_line() -> None:
    bundle = tiny.tiny_bundle("int8", choose=True)
    banned = chain(*(("--logit-bias", f"{token}=-inf") for token in range(bundle.geometry.vocab)))
    refused(
        run(bundle.folder, "1 2 3\n", *banned),
        "the request forbids every token that the model could choose",
    )


def test_a_bundle_that_chooses_in_its_graphs_refuses_sampling() -> None:
    refused(
        run(tiny.tiny_bundle("int8").folder, "1 2 3\n", "--temperature", "1"),
        "export it with --choose host",
    )


def test_what_the_model_recommends_is_used_when_sampling_is_asked_for(folder: Path) -> None:
    bundle = tiny.tiny_bundle("int8", choose=True)
    file = recommending(
        bundle, folder, top_k=5, repetition_penalty=1.4, temperature=0.9, suppress=[7, 9]
    )
    prompts = [[1, 2, 3], [7]]
    with Session.open(file) as session:
        for options, asked in (
            (["--sample"], {}),
            (["--temperature", "1.5", "--seed", "4"], {"temperature": 1.5, "seed": 4}),
            (["--top-p", "0.8"], {"top_p": 0.8}),
        ):
            expected = []
            for ids in prompts:
                list(session.runs(ids, max_tokens=20, sampling=session.sampling(**asked)))
                expected.append(session.last.tokens)
            done = run(file, lines(prompts), "--max-tokens", "20", *options)
            assert (done.returncode, done.stdout) == (0, lines(expected)), done.stderr
    done = run(file, lines(prompts), "--max-tokens", "20")
    assert done.stderr.startswith("host: the model recommends sampling; --sample does so\n")
    assert (
        done.stdout
        == run(bundle.folder, lines(prompts), "--max-tokens", "20", "--temperature", "0").stdout
    )
    wrong = recommending(bundle, folder, top_p=3.0)
    refused(run(wrong, "1\n", "--sample"), "top_p is 3.0, expected above 0, at most 1")


def test_fields_that_a_manifest_leaves_out_change_nothing(folder: Path) -> None:
    expected = run(folder, "1 2 3\n", "--max-tokens", "9", "--no-kernels").stdout
    assert leave_out_defaults(folder) > 10 and expected
    done = run(folder, "1 2 3\n", "--max-tokens", "9", "--no-kernels")
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def recommending(bundle: Bundle, folder: Path, **sampling: object) -> Path:
    """A copy of a bundle whose model recommends something."""
    shutil.copytree(bundle.folder, folder, dirs_exist_ok=True)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["sampling"] = {"do_sample": True, **sampling}
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return folder


@pytest.mark.parametrize(("repeats", "short", "least"), [(3, 0, 1.5), (4, 2, 1.4)])
def test_drafts_repeat_the_text_of_a_model_without_streams(
    repeats: int, short: int, least: float, with_kernels: bool
) -> None:
    bundle = tiny.tiny_bundle("int8", streams=False, repeats=repeats)
    assert bundle.geometry.short == short
    compare(bundle, lambda _: [[1, 2, 3, 4] * 4, [7, 5, 3], [2] * 9], 60, with_kernels)
    options = [] if with_kernels else ["--no-kernels"]
    done = run(bundle.folder, lines([[2] * 9]), "--max-tokens", "13", *options)
    assert len(set(done.stdout.split())) == 1  # the model repeats a token so often
    assert float(done.stderr.split()[2]) > least, done.stderr


@pytest.mark.parametrize(("beyond", "per_call"), [(False, 2), (True, 1)])
def test_a_phrase_that_the_model_says_is_drafted(
    tmp_path: Path, beyond: bool, per_call: int
) -> None:
    bundle, prompt, answer = tiny.bundle_with_a_phrase(tmp_path / "bundle", beyond=beyond)
    compare(
        bundle, lambda _: [prompt, *([token] for token in range(1, 10))], 20, with_kernels=False
    )
    done = run(bundle.folder, lines([prompt]), "--max-tokens", "3", "--no-kernels")
    assert (done.returncode, done.stdout) == (0, lines([answer])), done.stderr
    assert float(done.stderr.split()[2]) == per_call


@pytest.mark.parametrize("size", [12, 8 << LARGEST])
def test_a_table_of_phrases_that_is_none_is_one_line(tmp_path: Path, size: int) -> None:
    bundle = tiny.with_phrases(
        tiny.tiny_bundle("int8", streams=False, repeats=4), tmp_path / "bundle", bytes(size)
    )
    refused(
        run(bundle.folder, "1 2 3\n", "--no-kernels"),
        f"phrases.bin: {size} bytes are no table of phrases",
    )


def test_a_bundle_for_plain_decoding_needs_no_option(with_kernels: bool) -> None:
    bundle = tiny.tiny_bundle("int8", streams=False)
    chosen: tuple[list[str], ...] = ([], ["--plain"], ["--plain-step"], ["--speculative"])
    answers = {
        run(bundle.folder, "1 2 3\n", "--max-tokens", "9", *options).stdout for options in chosen
    }
    assert len(answers) == 1 and len(answers.pop().split()) > 1


@pytest.mark.slow
def test_tokens_of_the_shipped_model_are_those_of_python(with_kernels: bool) -> None:
    def export(out: Path) -> None:
        from ssdevice.export.plan import ExportOptions, Quant
        from ssdevice.export.stages import export_bundle

        adapters = (("sql", MODELS / "adapters" / "sql-shared"),)
        base = str(MODELS / "base-7m")
        options = ExportOptions(
            model=base, target="onnx", quant=Quant.INT8, out=out, adapters=adapters
        )
        export_bundle(options, lambda *_: None)

    def prompts(session: Session) -> Prompts:
        files = [MODELS / "prompts" / name for name in ("sql.jsonl", "general.jsonl")]
        rows = [row for file in files for row in file.read_text("utf-8").splitlines()]
        return [session.prompt_ids(json.loads(row)["prompt"]) for row in rows[:PROMPTS]]

    compare(Bundle.open(made_once("cpp_host/sql", export)), prompts, 60, with_kernels)


@pytest.mark.slow
def test_it_builds_with_cmake(tmp_path: Path) -> None:
    if not shutil.which("cmake"):
        pytest.skip("needs a C++ compiler and CMake (Debian: apt-get install g++ cmake)")
    for arguments in (
        ["-S", SOURCES, "-B", tmp_path, f"-DONNXRUNTIME={host_build.package()}"],
        ["--build", tmp_path],
    ):
        done = subprocess.run(["cmake", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run(
        tiny.tiny_bundle("int8").folder, "1 2 3\n", "--max-tokens", "1", program=tmp_path / "host"
    )
    assert done.returncode == 0 and len(done.stdout.split()) == 1


def with_a_slot(file: Path) -> None:
    model = onnx.load(file, load_external_data=False)
    model.graph.input.append(
        onnx.helper.make_tensor_value_info("slot", onnx.TensorProto.FLOAT, [2])
    )
    onnx.save(model, file)


def with_double_rows(file: Path) -> None:
    model = onnx.load(file, load_external_data=False)
    rows = next(value for value in model.graph.output if value.name == ROWS)
    for node in model.graph.node:
        node.output[:] = [f"{name}_narrow" if name == ROWS else name for name in node.output]
    rows.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    model.graph.node.append(
        onnx.helper.make_node("Cast", [f"{ROWS}_narrow"], [ROWS], to=onnx.TensorProto.DOUBLE)
    )
    onnx.save(model, file)


def with_a_folder_called_like_a_file(folder: Path) -> None:
    (folder / "Step.onnx").mkdir()
    (folder / "Step.onnx" / "a").touch()
    rehash(folder)


def of_an_fp32_bundle(file: Path) -> None:
    for name in (file.name, "weights.bin"):
        shutil.copy(tiny.tiny_bundle("fp32").folder / name, file.with_name(name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a bundle, to be broken."""
    shutil.copytree(tiny.tiny_bundle("int8").folder, tmp_path / "bundle")
    return tmp_path / "bundle"


def refused_by_both(folder: Path, message: str) -> None:
    """Python does not open the bundle, nor does the host, which says so in one line."""
    with pytest.raises(BundleError):
        Bundle.open(folder)
    refused(run(folder, "1 2 3\n", "--no-kernels"), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "no tensor file"),
        (lambda file: file.write_bytes(b"no model"), "step.onnx failed"),
        (
            lambda file: shutil.copy(file.with_name("step_plain.onnx"), file),
            'the graph has no tensor "drafts"',
        ),
        (
            lambda file: shutil.copy(file.with_name("prefill.onnx"), file),
            '"chunk" is no tensor of the contract',
        ),
        (with_a_slot, '"slot" is no tensor of the contract'),
        (with_double_rows, '"rows" is no tensor of the contract, or has another type'),
        (of_an_fp32_bundle, '"past_keys.0" is no tensor of the contract, or has another type'),
    ],
)
def test_a_graph_that_is_not_that_of_the_manifest_is_one_line(
    folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(folder / "step.onnx")
    assert rehash(folder)
    refused(
        run(folder, "1 2 3\n", "--no-kernels"),
        message if (folder / "step.onnx").exists() else "is not in files",
    )


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("schema_version", 2, '["schema_version"] is 2, expected 1 to 1'),
        ("schema_version", None, '["schema_version"] is null, expected integer'),
        ("geometry/k", 5, 'function "step" does not follow from the geometry'),
        ("geometry/k", 0, '["k"] is 0, expected 1 to 256'),
        ("geometry/context", -96, '["context"] is -96, expected 1 to 1048576'),
        ("geometry/context", 96.0, '["context"] is number, expected integer'),
        ("geometry/context", 1 << 80, '["context"] is number, expected integer'),
        ("geometry/context", 4, "contradict each other"),
        ("geometry/short", 3, "contradict each other"),
        ("geometry/short", 32, '["short"] is 32, expected 0 to 31'),
        ("geometry/chunk", 1 << 16, 'function "prefill" does not follow'),
        ("geometry/tree", [[0], [0]], "no tree of 2 candidates"),
        ("geometry/tree", [[2]], "no tree of 2 candidates"),
        ("geometry/tree", [[0], [1, 0]], "no tree of 2 candidates"),
        ("geometry/tree", [[0], [0, 0], [1]], "no tree of 2 candidates"),
        ("geometry/tree", [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "contradict each other"),
        ("geometry/vocab", 98, "model and geometry"),
        ("functions/0/inputs/1/shape/1", 5, 'function "step" does not follow'),
        ("functions/0/name", "sleep", 'function "sleep" does not follow'),
        ("functions/0/name", "step_short", 'function "step_short" does not follow'),
        ("functions/0/inputs/3/shape/0", "future", "the unknown size"),
        ("functions/0/outputs/3/dtype", "float8", 'no tensors of "float8"'),
        ("functions", [], "the number of entries is 0, expected 1 to 7"),
        ("cache", "state", "another target than onnx"),
        ("precision", "int2", '["precision"] is not one of'),
        ("mode", None, "geometry.gamma, msa_layers and mode contradict each other"),
        ("msa_layers", 2, "geometry.gamma, msa_layers and mode contradict each other"),
        ("apps/0/base_sha256", "0" * 64, 'app "letters" is for another base'),
        ("apps/0/base_sha256", "0" * 63, "expected ^[0-9a-f]{64}$"),
        ("apps/0/base_sha256", "0" * 65, "65 characters, at most 64"),
        ("apps/0/mode", "lossless", "has another mode than the bundle"),
        ("apps/0/kind", "slot", "is not merged into the graphs"),
        ("default_app", "numbers", "default_app is not one of the apps"),
        ("roles/step", "steps.onnx", '"steps.onnx" is not in files'),
        ("roles/step", "../step.onnx", 'is "../step.onnx", expected ^'),
        ("files/step.onnx/size", 1, " bytes, manifest.json says 1"),
        (
            "files/step.onnx/sha256",
            "0" * 64,
            "step.onnx is damaged: its sha256 is not the one in manifest.json",
        ),
        ("files/more.onnx", {"size": 0, "sha256": "0" * 64}, "more.onnx: there is no such file"),
        ("files/Step.onnx", {"size": 0, "sha256": "0" * 64}, "Step.onnx: there is no such file"),
        ("files/a~1NUL.txt", {"size": 0, "sha256": "0" * 64}, "Windows reserves a name"),
        ("files/MANIFEST.json", {"size": 0, "sha256": "0" * 64}, "appears twice, or is reserved"),
        (
            "files/~1etc~1passwd",
            {"size": 0, "sha256": "0" * 64},
            'a name is "/etc/passwd", expected ^',
        ),
        ("files/a~1..~1b", {"size": 0, "sha256": "0" * 64}, 'a name is "a/../b", expected ^'),
        ("chat/frames", ..., "no template, and no frames of whole conversations"),
        ("chat/frames/user", None, "no template, and no frames of whole conversations"),
        ("chat/stop_ids", [-1], "chat.stop_ids: -1 is no token id"),
        ("chat/stop_ids", [True], "is boolean, expected integer"),
        ("more", 1, '["more"] is an unknown key'),
        ("geometry", ..., '"geometry" is missing'),
        ("tools/\x1b[31m", "x" * 201, '["tools"]["\\u001b[31m"] has 201 characters, at most 200'),
    ],
)
def test_a_manifest_that_python_refuses_is_one_line(
    folder: Path, place: str, value: object, message: str
) -> None:
    file = folder / "manifest.json"
    document = json.loads(file.read_text("utf-8"))
    *parents, last = [part.replace("~1", "/") for part in place.split("/")]
    at: Any = document
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    if value is ...:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    file.write_text(json.dumps(document), "utf-8")
    refused_by_both(folder, message)


def test_drafts_that_are_verified_but_not_made_again_are_one_line(tmp_path: Path) -> None:
    folder = Path(
        shutil.copytree(tiny.tiny_bundle("int8", choose=True).folder, tmp_path / "bundle")
    )
    file = folder / "manifest.json"
    document = json.loads(file.read_text("utf-8"))
    document["functions"] = [each for each in document["functions"] if each["name"] != "draft"]
    file.write_text(json.dumps(document), "utf-8")
    refused_by_both(folder, "verify and draft need each other")


def test_bundles_that_only_other_hosts_run_are_one_line(folder: Path) -> None:
    file = folder / "manifest.json"
    document = json.loads(file.read_text("utf-8"))
    apps = [*document["apps"], {**document["apps"][0], "name": "more"}]
    others = (
        ({"apps": apps}, "this host runs bundles of one app"),
        ({"target": "coreml"}, "another target than onnx"),
    )
    for changes, message in others:
        file.write_text(json.dumps({**document, **changes}), "utf-8")
        Bundle.open(folder)
        refused(run(folder, "1 2 3\n"), message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"k": 2', b'"k": 2, "k": 2', 'key "k" appears twice in one object'),
        (b'"k": 2', b'"k": NaN', "not JSON"),
        (b'"k": 2', b'"k": 1e999', "not JSON"),
        (b'"k": 2', b'"k": ' + b"[" * 40 + b"]" * 40, "nested deeper than 32 levels"),
        (b'"k": 2', b'"k": ' + b"[" * 100_000, "nested deeper than 32 levels"),
        (b'"k": 2', b'"k": 2,', "not JSON"),
        (b"letters", b"\xff", "not JSON, or not UTF-8"),
        (b"letters", b"\\ud800", "not JSON, or not UTF-8"),
        (b"{", b"\xef\xbb\xbf{", "a byte order mark"),
        (b"{", b"[", "not JSON"),
        (b"{", b" " * (4 << 20) + b"{", "more than 4194304 bytes"),
    ],
)
def test_json_on_which_readers_may_disagree_is_one_line(
    folder: Path, old: bytes, new: bytes, message: str
) -> None:
    file = folder / "manifest.json"
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    refused_by_both(folder, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no such bundle"),
        (
            lambda folder: (folder / "manifest.json").unlink(),
            "manifest.json: there is no such file",
        ),
        (lambda folder: (folder / "manifest.json").write_bytes(b""), "not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is array, expected object"),
        (lambda folder: extend(folder / "manifest.json", b"\0"), "a NUL character"),
        (lambda folder: (folder / "step.onnx").unlink(), "step.onnx: there is no such file"),
        (lambda folder: (folder / "more.txt").touch(), '"more.txt" is not listed; remove it'),
        (lambda folder: (folder / "link").symlink_to("/etc"), '"link" is not a plain file'),
        (lambda folder: os.mkfifo(folder / "pipe"), '"pipe" is not a plain file'),
        (lambda folder: flip(folder / "weights.bin"), "weights.bin is damaged"),
        (with_a_folder_called_like_a_file, '"Step.onnx" is a folder, too'),
    ],
)
def test_a_folder_that_is_not_as_listed_is_one_line(
    folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(folder)
    refused_by_both(folder, message)


def extend(file: Path, more: bytes) -> None:
    file.write_bytes(file.read_bytes() + more)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_changed_manifests_are_refused_or_harmless() -> None:
    results = fuzz.run_cases(3, range(20), 1)
    assert not [result for result in results if result.outcome == "BUG"]
    assert {"refused", "same"} <= {result.outcome for result in results}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("1 two 3", "expected token ids from 0 to"),
        ("-1", "expected token ids from 0 to"),
        ("1 99999999999", "expected token ids from 0 to"),
        ("1 " * (tiny.CONTEXT + 1), f"the prompt has {tiny.CONTEXT + 1} tokens"),
    ],
)
def test_a_wrong_prompt_is_one_line(prompt: str, message: str) -> None:
    refused(run(tiny.tiny_bundle("int8").folder, f"{prompt}\n"), message)


def test_an_empty_line_is_answered_by_one() -> None:
    bundle = tiny.tiny_bundle("int8").folder
    answers = [run(bundle, f"{prompt}\n", "--max-tokens", "3").stdout for prompt in ("1 2", "3")]
    done = run(bundle, "1 2\n\n \t\r\n3\n\n", "--max-tokens", "3")
    assert (done.returncode, done.stdout) == (0, f"{answers[0]}\n\n{answers[1]}\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--plian"],
        ["--max-tokens"],
        ["--plain", "--speculative"],
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, options: list[str]) -> None:
    refused(run(tmp_path, "", *options), "expected BUNDLE [--plain")


@pytest.mark.parametrize(
    "options", [["--max-tokens", "0"], ["--max-tokens", "99999999999"], ["--threads", "two"]]
)
def test_wrong_numbers_are_one_line(tmp_path: Path, options: list[str]) -> None:
    refused(run(tmp_path, "", *options), "expected a whole number from 1 to 2147483647")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_answers_that_cannot_be_written_are_an_error() -> None:
    command = [
        str(host_build.host()),
        str(tiny.tiny_bundle("int8").folder),
        "--threads",
        "1",
        "--max-tokens",
        "2",
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, input="1 2\n", stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "host: the answers cannot be written\n")


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr
