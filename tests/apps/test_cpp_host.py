"""The C++ host: the tokens of Python's session, and one line about what it cannot run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import onnx
import onnxruntime
import pytest

from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import CacheDtype
from ssdevice.contract import ROWS
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.session import Session
from tests.compiled_kernels import COMPILER, NO_COMPILER, built
from tests.once import made_once
from tests.runtime import tiny_bundle as tiny

pytestmark = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "apps" / "cpp_host"
MODELS = ROOT / "models"
PROMPTS = 30
Prompts = Sequence[Sequence[int]]


def package() -> Path:
    """A folder like that of a release of ONNX Runtime: our stand-in for its header, and the library of the wheel."""

    def make(out: Path) -> None:
        (out / "include").mkdir(parents=True)
        (out / "lib").mkdir()
        header = "onnxruntime_c_api.h"
        (out / "include" / header).symlink_to(Path(__file__).with_name("cpp_host") / header)
        library = next(Path(onnxruntime.__file__).with_name("capi").glob("libonnxruntime.*"))
        for name in {library.name, "libonnxruntime.so", "libonnxruntime.so.1", "libonnxruntime.dylib"}:
            (out / "lib" / name).symlink_to(library)

    return made_once("cpp_host/package", make)


def host() -> Path:
    """The compiled host."""

    def make(file: Path) -> None:
        include, lib = package() / "include", package() / "lib"
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{include}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
        linked = ["-DSSDEVICE_KERNELS", built("native")]
        subprocess.run([str(COMPILER), *flags, "-o", file, SOURCES / "host.cpp", *linked, "-lonnxruntime"], check=True)

    return made_once("cpp_host/host", make)


def run(folder: Path, prompts: str, *options: str, program: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(program or host()), str(folder), "--threads", "1", *options]
    return subprocess.run(command, input=prompts, capture_output=True, text=True)


def lines(rows: Prompts) -> str:
    return "".join(" ".join(map(str, row)) + "\n" for row in rows)


MODES = (("speculative", "--speculative"), ("plain", "--plain"), ("adaptive", ""))
"""Python's decoding modes, and the options of the host; when the last one makes steps depends on what they take."""


def compare(bundle: Bundle, prompts: Callable[[Session], Prompts], max_tokens: int, with_kernels: bool) -> None:
    """Compare the host with a session of a bundle, in every mode."""
    with Session.open(bundle, options=EngineOptions(threads=1, kernels=with_kernels)) as session:
        assert session.engine.kernels is with_kernels
        given = prompts(session)
        for mode, option in MODES:
            expected, steps = [], 0
            for ids in given:
                list(session.runs(ids, max_tokens=max_tokens, mode=mode))
                expected.append(session.last.tokens)
                steps += session.last.steps
            options = ["--max-tokens", str(max_tokens), *option.split(), *([] if with_kernels else ["--no-kernels"])]
            done = run(bundle.folder, lines(given), *options)
            assert (done.returncode, done.stdout) == (0, lines(expected)), done.stderr
            speed, _, per_call, *_ = done.stderr.split()
            assert float(speed) > 0
            if mode == "plain" or (mode == "speculative" and session.streams):
                assert float(per_call) == pytest.approx((sum(map(len, expected)) - len(given)) / steps, rel=1e-4)


@pytest.fixture(params=[True, False], ids=["kernels", "no-kernels"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether both hosts use the kernels."""
    monkeypatch.setattr(kernels, "library", lambda: built("native"))
    return bool(request.param)


@pytest.mark.parametrize(("quant", "dtype"), [("int8", CacheDtype.FP16), ("fp32", CacheDtype.FP32)])
@pytest.mark.parametrize("max_tokens", [2, 40])
def test_tokens_are_those_of_python(max_tokens: int, quant: str, dtype: CacheDtype, with_kernels: bool) -> None:
    def prompts(session: Session) -> Prompts:
        geometry, random = session.engine.geometry, Random(0)
        sizes = [1, geometry.chunk, geometry.chunk + 1, geometry.context - 1, geometry.context]  # and some at random
        sizes += [random.randint(1, geometry.context) for _ in range(PROMPTS - len(sizes))]
        return [[random.randrange(1, geometry.vocab) for _ in range(size)] for size in sizes]

    bundle = tiny.tiny_bundle(quant)
    assert bundle.manifest.cache_dtype is dtype
    compare(bundle, prompts, max_tokens, with_kernels)


@pytest.mark.parametrize("option", ["", "--speculative"])
def test_drafts_repeat_the_text_of_a_model_without_streams(option: str, with_kernels: bool) -> None:
    bundle = tiny.tiny_bundle("int8", streams=False, repeats=3)
    compare(bundle, lambda _: [[1, 2, 3, 4] * 4, [7, 5, 3], [2] * 9], 60, with_kernels)
    options = [*option.split(), *([] if with_kernels else ["--no-kernels"])]
    done = run(bundle.folder, lines([[2] * 9]), "--max-tokens", "13", *options)
    assert len(set(done.stdout.split())) == 1  # the model repeats a token so often
    assert float(done.stderr.split()[2]) > 1.5, done.stderr


def test_a_bundle_for_plain_decoding_needs_no_option(with_kernels: bool) -> None:
    bundle = tiny.tiny_bundle("int8", streams=False)
    chosen: tuple[list[str], ...] = ([], ["--plain"], ["--speculative"])
    answers = {run(bundle.folder, "1 2 3\n", "--max-tokens", "9", *options).stdout for options in chosen}
    assert len(answers) == 1 and len(answers.pop().split()) > 1


@pytest.mark.slow
def test_tokens_of_the_shipped_model_are_those_of_python(with_kernels: bool) -> None:
    def export(out: Path) -> None:
        from ssdevice.export.plan import ExportOptions, Quant
        from ssdevice.export.stages import export_bundle

        adapters = (("sql", MODELS / "adapters" / "sql-shared"),)
        base = str(MODELS / "base-7m")
        options = ExportOptions(model=base, target="onnx", quant=Quant.INT8, out=out, adapters=adapters)
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
    for arguments in (["-S", SOURCES, "-B", tmp_path, f"-DONNXRUNTIME={package()}"], ["--build", tmp_path]):
        done = subprocess.run(["cmake", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run(tiny.tiny_bundle("int8").folder, "1 2 3\n", "--max-tokens", "1", program=tmp_path / "host")
    assert done.returncode == 0 and len(done.stdout.split()) == 1


def with_a_slot(file: Path) -> None:
    model = onnx.load(file, load_external_data=False)
    model.graph.input.append(onnx.helper.make_tensor_value_info("slot", onnx.TensorProto.FLOAT, [2]))
    onnx.save(model, file)


def with_double_rows(file: Path) -> None:
    model = onnx.load(file, load_external_data=False)
    rows = next(value for value in model.graph.output if value.name == ROWS)
    for node in model.graph.node:
        node.output[:] = [f"{name}_narrow" if name == ROWS else name for name in node.output]
    rows.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    model.graph.node.append(onnx.helper.make_node("Cast", [f"{ROWS}_narrow"], [ROWS], to=onnx.TensorProto.DOUBLE))
    onnx.save(model, file)


def of_an_fp32_bundle(file: Path) -> None:
    for name in (file.name, "weights.bin"):
        shutil.copy(tiny.tiny_bundle("fp32").folder / name, file.with_name(name))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("manifest.json", Path.unlink, "manifest.json: there is no such file"),
        ("manifest.json", lambda file: file.write_text("{}"), "manifest.json: there is no valid stop_ids"),
        ("manifest.json", lambda file: file.write_text('{"stop_ids": [0]}'), "there is no valid context"),
        ("step.onnx", Path.unlink, "step.onnx: there is no such file"),
        ("step.onnx", lambda file: file.write_bytes(b"no model"), "step.onnx failed"),
        ("step.onnx", lambda file: shutil.copy(file.with_name("step_plain.onnx"), file), "has no tensor 'count'"),
        ("prefill.onnx", lambda file: shutil.copy(file.with_name("step.onnx"), file), "has no tensor 'chunk'"),
        ("step.onnx", with_a_slot, "'slot' is no tensor of a bundle with one app"),
        ("step.onnx", with_double_rows, "'rows' is no tensor of a bundle with one app and a float32 or float16 cache"),
        ("step.onnx", of_an_fp32_bundle, "the graphs are of different exports"),
    ],
)
def test_a_broken_bundle_is_one_line(tmp_path: Path, name: str, change: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny.tiny_bundle("int8").folder, folder)
    change(folder / name)
    refused(run(folder, "1 2 3\n", "--no-kernels"), message)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "expected token ids from 0 to"),
        ("1 two 3", "expected token ids from 0 to"),
        ("-1", "expected token ids from 0 to"),
        ("1 99999999999", "expected token ids from 0 to"),
        ("1 " * (tiny.CONTEXT + 1), f"the prompt has {tiny.CONTEXT + 1} tokens"),
    ],
)
def test_a_wrong_prompt_is_one_line(prompt: str, message: str) -> None:
    refused(run(tiny.tiny_bundle("int8").folder, f"{prompt}\n"), message)


@pytest.mark.parametrize(
    "options",
    [["--plian"], ["--max-tokens"], ["--max-tokens", "0"], ["--threads", "two"], ["--plain", "--speculative"]],
)
def test_wrong_options_are_one_line(tmp_path: Path, options: list[str]) -> None:
    refused(run(tmp_path, "", *options), "expected BUNDLE [--plain")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_answers_that_cannot_be_written_are_an_error() -> None:
    command = [str(host()), str(tiny.tiny_bundle("int8").folder), "--threads", "1", "--max-tokens", "2"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, input="1 2\n", stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "host: the answers cannot be written\n")


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr
