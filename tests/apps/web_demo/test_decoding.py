"""The page's modules in Node: the tokens, texts and tensors of Python, and nothing of a damaged
bundle.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from ssdevice.adapters.storage import stored
from ssdevice.bench.equality import first_difference
from ssdevice.bench.modes import led
from ssdevice.bundle.manifest import CacheDtype, Precision
from ssdevice.export.onnx.graphs import LogitsEngine
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.loop import plain
from ssdevice.runtime.onnx.adapter import AdapterTensors, write_adapter
from ssdevice.runtime.phrases import LARGEST
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session
from tests.apps.web_demo import host, shipped
from tests.bundle.optional import leave_out_defaults
from tests.runtime import tiny_bundle as tiny
from tests.text.test_tokenizer import TOKENIZERS
from tests.vectors.sampling import FILE as VECTORS
from tests.vectors.sessions import FILE as SESSIONS

TEXTS = (
    "<|user|>List the names of all customers.<|end|><|assistant|>",
    "SELECT name FROM table_12 WHERE price >= 3.50 AND city = 'Zürich'",
    "  two  spaces, a\ttab\nand a line; it's don't we'll I'M\r\n",
    "日本語 и кириллица 🙂 👩‍👩‍👧 e\u0301  ½  ²  ٣٤ \u00a0\u200b\u2028",
)
CHARACTERS = "abc XYZ 019 .,;'\"\n\t_-()<|>äß中🙂½²٣\u00a0\u2028\u0301"
BASE = "ab" * 32
MAX_TOKENS = 60
NEAR_TIE = 0.18
"""Twice what INT8 changes a logit of this model by when sums run in another order (0.09)."""


def expected(session: Session, ids: list[int], mode: str, max_tokens: int) -> list[int]:
    return [
        token for run in session.runs(ids, max_tokens=max_tokens, mode=mode) for token in run.tokens
    ]


@pytest.mark.parametrize(("quant", "dtype"), [("fp32", CacheDtype.FP32), ("int8", CacheDtype.FP16)])
def test_the_loop_gives_the_tokens_of_a_session(quant: str, dtype: CacheDtype) -> None:
    bundle = tiny.tiny_bundle(quant)
    assert bundle.manifest.cache_dtype is dtype
    with Session.open(bundle, threads=1) as session:
        prompts = [
            session.prompt_ids(text) for text in ("hello", "a prompt of more than two chunks")
        ]
        # The last of these sizes fills the context.
        requests = [
            {"app": tiny.APP, "ids": ids, "max_tokens": most}
            for ids in prompts
            for most in (1, 2, 3, 1000)
        ]
        for request, said in zip(requests, host.decoded(bundle.folder, requests), strict=True):
            for mode in ("plain", "plain_step", "adaptive", "speculative"):
                assert said[mode] == expected(session, request["ids"], mode, request["max_tokens"])
                assert said["text"] == session.last.text
            assert said["steps"] == session.last.steps


@pytest.mark.parametrize(("beyond", "steps"), [(False, 1), (True, 2)])
def test_a_phrase_that_the_model_says_is_drafted(tmp_path: Path, beyond: bool, steps: int) -> None:
    bundle, prompt, answer = tiny.bundle_with_a_phrase(tmp_path / "bundle", beyond=beyond)
    requests = [
        {"app": "base", "ids": ids, "max_tokens": most}
        for ids, most in ((prompt, 3), ([1, 2, 3, 4] * 4, 60))
    ]
    short, long = host.decoded(bundle.folder, requests)
    assert (
        short["plain"] == short["adaptive"] == answer and short["adaptive_speed"]["steps"] == steps
    )
    with Session.open(bundle, options=EngineOptions(threads=1, kernels=False)) as session:
        for mode in ("plain", "plain_step", "adaptive", "speculative"):
            assert long[mode] == expected(session, requests[1]["ids"], mode, 60)


@pytest.mark.parametrize("size", [12, 8 << LARGEST])
def test_a_table_of_phrases_that_is_none_is_refused(tmp_path: Path, size: int) -> None:
    bundle = tiny.with_phrases(
        tiny.tiny_bundle("int8", streams=False, repeats=4), tmp_path / "bundle", bytes(size)
    )
    request = {"app": "base", "ids": [9], "max_tokens": 2}
    done = host.script("decode.mjs", bundle.folder, given=host.lines([request]))
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        f"{size} bytes are no table of phrases\n",
    )


SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2},
    {
        "temperature": 0.7,
        "top_k": 5,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
)


def test_sampled_answers_are_those_of_a_session() -> None:
    """The tokens of plain and of speculative decoding, which agree; greedy ones in between come
    from other graphs.
    """
    bundle = tiny.tiny_bundle("fp32", choose=True)
    with Session.open(bundle, threads=1) as session:
        prompts = [session.prompt_ids(text) for text in ("5", "a prompt of more than two chunks")]
        cases = list(product(prompts, enumerate(SAMPLERS), (1, 7, 1000)))
        requests = []
        for ids, (number, asked), most in cases:
            sampled = {"sampling": asked, "seed": str(number * (1 << 62))}
            requests += [{"app": tiny.APP, "ids": ids, "max_tokens": most, **sampled}]
        requests.insert(1, {"app": tiny.APP, "ids": prompts[0], "max_tokens": 9})
        for request, said in zip(requests, host.decoded(bundle.folder, requests), strict=True):
            asked = request.get("sampling")
            sampling = asked and Sampling(**asked, seed=int(request["seed"]))
            for mode in ("plain", "adaptive", "speculative"):
                runs = session.runs(
                    request["ids"], max_tokens=request["max_tokens"], mode=mode, sampling=sampling
                )
                assert said[mode] == [token for run in runs for token in run.tokens], request


def test_answers_are_those_of_the_test_vectors() -> None:
    done = host.script("vectors.mjs", VECTORS)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["cases"] > 200


def test_the_loop_repeats_recorded_sessions() -> None:
    done = host.script("sessions.mjs", SESSIONS)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == ["sessions"], done.stdout


def test_what_the_model_recommends_is_used_when_sampling_is_asked_for(tmp_path: Path) -> None:
    bundle = tiny.tiny_bundle("fp32", choose=True)
    folder = shutil.copytree(bundle.folder, tmp_path / "bundle")
    document = json.loads((folder / "manifest.json").read_text("utf-8"))
    document["sampling"] = {
        "do_sample": True,
        "top_k": 5,
        "repetition_penalty": 1.4,
        "suppress": [7],
        "min_p": None,
    }
    (folder / "manifest.json").write_text(json.dumps(document), "utf-8")
    cases: tuple[dict[str, Any], ...] = (
        {"seed": 1},
        {"temperature": 0.6, "seed": 2},
        {"top_k": 0, "seed": 3},
    )
    requests = []
    for asked in cases:
        options = {**asked}
        seed = str(options.pop("seed"))
        request = {"app": tiny.APP, "ids": [9, 8], "max_tokens": 20, "sample": True}
        requests.append({**request, "seed": seed, "sampling": options})
    with Session.open(folder, threads=1) as session:
        for asked, said in zip(cases, host.decoded(folder, requests), strict=True):
            runs = session.runs(
                [9, 8], max_tokens=20, mode="plain", sampling=session.sampling(**asked)
            )
            assert (
                said["plain"] == said["adaptive"] == [token for run in runs for token in run.tokens]
            ), asked


def test_fields_that_a_manifest_leaves_out_change_nothing(tmp_path: Path) -> None:
    bundle = tiny.tiny_bundle("fp32")
    folder = shutil.copytree(bundle.folder, tmp_path / "bundle")
    assert leave_out_defaults(folder) > 10
    requests = [{"app": tiny.APP, "ids": [9, 8], "max_tokens": 9}]
    (said,) = host.decoded(folder, requests)
    with Session.open(bundle, threads=1) as session:
        assert said["speculative"] == expected(session, [9, 8], "speculative", 9)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1}, "temperature is -1, expected 0 to 100"),
        ({"temperature": 1e-7}, "temperature is 1e-7, expected 0 (greedy), or 1e-6 to 100"),
        ({"top_p": 0}, "top_p is 0, expected above 0, at most 1"),
        ({"suppress": [9999]}, "token 9999 is not one of the model's 99"),
        ({"bad_words": [[]]}, "bad_words has a sequence without tokens"),
    ],
)
def test_what_cannot_be_sampled_is_refused(sampling: dict[str, Any], message: str) -> None:
    asked = {"temperature": 1, **sampling}
    request = {"app": tiny.APP, "ids": [9], "max_tokens": 2, "sampling": asked, "seed": "0"}
    done = host.script(
        "decode.mjs", tiny.tiny_bundle("fp32", choose=True).folder, given=host.lines([request])
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{message}\n")


def test_a_bundle_that_chooses_in_its_graphs_refuses_sampling() -> None:
    request = {
        "app": tiny.APP,
        "ids": [9],
        "max_tokens": 2,
        "sampling": {"temperature": 1},
        "seed": "0",
    }
    done = host.script("decode.mjs", tiny.tiny_bundle("fp32").folder, given=host.lines([request]))
    message = "the bundle chooses tokens greedily; to sample, export it with --choose host\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


@pytest.mark.parametrize("role", ["tokenizer", "weights", "step"])
def test_a_damaged_file_is_refused(tmp_path: Path, role: str) -> None:
    folder = host.damaged(tiny.tiny_bundle("fp32"), tmp_path / "bundle", role)
    done = host.script(
        "decode.mjs", folder, given=host.lines([{"app": tiny.APP, "ids": [9], "max_tokens": 2}])
    )
    assert done.returncode == 1 and not done.stdout
    assert (
        done.stderr.count("\n") == 1
        and "is damaged: its sha256 is not the one in manifest.json" in done.stderr
    )


def manifest(change: Callable[[dict[str, Any]], object], out: Path) -> Path:
    """A folder with nothing but the changed manifest of a bundle."""
    values = json.loads((tiny.tiny_bundle("fp32").folder / "manifest.json").read_text("utf-8"))
    change(values)
    (out / "manifest.json").write_text(json.dumps(values), "utf-8")
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "int4"}, "INT4 has no fast kernel in browsers; export with --quant int8"),
        ({"target": "coreml"}, "a bundle for coreml; export one with --target onnx"),
        ({"schema_version": 2}, "schema 2: this page reads 1"),
        ({"cache_dtype": "bfloat16"}, "a cache of bfloat16; browsers need float32 or float16"),
        ({"files": {"../secret": {}}}, 'the path "../secret" leaves the bundle'),
    ],
)
def test_a_bundle_for_others_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    done = host.script("decode.mjs", manifest(lambda values: values.update(change), tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{message}\n")


def test_texts_have_the_ids_of_the_python_tokenizer() -> None:
    folder = shipped.MODELS / "base-7m"
    tokenizer = open_tokenizer(folder)
    draw = Random(0)
    texts = [
        *TEXTS,
        *("".join(draw.choices(CHARACTERS, k=draw.randint(0, 40))) for _ in range(1000)),
    ]
    done = host.script("tokenize.mjs", folder / "tokenizer.json", given=json.dumps(texts))
    for text, found in zip(texts, json.loads(done.stdout), strict=True):
        assert found["ids"] == tokenizer.encode(text), ascii(text)
        assert found["text"] == tokenizer.decode(found["ids"])


def test_broken_characters_spoil_no_others(tmp_path: Path) -> None:
    """The pieces of a stream whose tokens end within characters are what the ids say at once."""
    broken = Tokenizer.from_file(str(shipped.MODELS / "base-7m" / "tokenizer.json"))
    draw = Random(0)
    parts = [
        broken.encode(text, add_special_tokens=False).ids for text in ("🙂", "é", "\ufffd", "a")
    ]
    given = []
    for _ in range(1000):
        ids = list[int]()
        for part in draw.choices(parts, k=6):
            ids += part[: draw.randint(1, 4)]
        given.append(ids)
    done = host.script(
        "tokenize.mjs", shipped.MODELS / "base-7m" / "tokenizer.json", given=json.dumps(given)
    )
    assert [found["text"] for found in json.loads(done.stdout)] == [
        broken.decode(ids) for ids in given
    ]

    fallback = TOKENIZERS[
        "byte_fallback"
    ]  # a byte is a token, and decoding a broken run spoils it all
    (tmp_path / "tokenizer.json").write_text(fallback.to_str(), "utf-8")
    texts = ["".join(draw.choices("\ufffdé🙂a ", k=12)) for _ in range(300)]
    given = [fallback.encode(text, add_special_tokens=False).ids for text in texts]
    done = host.script("tokenize.mjs", tmp_path / "tokenizer.json", given=json.dumps(given))
    assert [found["text"] for found in json.loads(done.stdout)] == [
        fallback.decode(ids) for ids in given
    ]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.INT8])
def test_adapters_have_the_tensors_that_python_reads(tmp_path: Path, precision: Precision) -> None:
    draw = np.random.default_rng(0)
    tensors = {
        "lora.down": draw.normal(size=(2, 16, 3)).astype(np.float32),
        "lora.up": draw.normal(scale=1e-6, size=(3, 2)).astype(np.float32),
        "ranks": np.arange(3, dtype=np.int32),
        "packed": draw.integers(-128, 128, (4, 2), dtype=np.int8),
    }
    file = tmp_path / "a.onnx_adapter"
    write_adapter(file, stored(tensors, precision), BASE)
    found = json.loads(host.script("adapter.mjs", file, BASE).stdout)
    wanted = AdapterTensors(file, BASE).values
    assert found.keys() == wanted.keys() == tensors.keys()
    for name, value in wanted.items():
        array = value.numpy()
        assert found[name]["type"] == array.dtype.name and found[name]["dims"] == list(array.shape)
        np.testing.assert_array_equal(
            np.array(found[name]["data"], array.dtype).reshape(array.shape), array
        )
    other = host.script("adapter.mjs", file, "cd" * 32)
    assert (other.returncode, other.stderr) == (1, "an adapter for another base\n")


@pytest.mark.slow  # exports the shipped model: `make web-test`
@pytest.mark.parametrize("app", [*shipped.APPS, "base"])
def test_apps_of_the_shipped_model_answer_as_in_python(app: str) -> None:
    bundle = shipped.bundle()
    prompts = shipped.prompts(app)
    answers = host.decoded(bundle.folder, host.framed(bundle, app, prompts, MAX_TOKENS))
    equal = 0
    with shipped.session(app) as session:
        for prompt, said in zip(prompts, answers, strict=True):
            ids = session.prompt_ids(prompt)
            assert said["ids"] == ids
            wanted = expected(session, ids, "plain", MAX_TOKENS)
            found = [said[mode] for mode in ("plain", "speculative") if mode in said]
            assert len(found) == (2 if app in shipped.APPS else 1)  # the base has no streams
            assert all(lost(app, ids, wanted, tokens) <= NEAR_TIE for tokens in found), prompt
            equal += all(tokens == wanted for tokens in found)
    assert equal >= 20, "an app's own text is decided, so near-ties are the exception"


def lost(app: str, ids: list[int], wanted: list[int], found: list[int]) -> float:
    """How far the first token that differs is behind the best one, in logits; 0 for equal ones."""
    position, best, other = first_difference(wanted, found)
    if wanted == found:
        return 0.0
    engine = LogitsEngine.of(shipped.bundle(), app, EngineOptions(threads=1, kernels=False))
    logits = led(engine.new_conversation(), ids, wanted, plain)[position - 1]
    return float(logits[best] - logits[other])


@pytest.mark.slow  # starts the type checker
def test_types_of_the_sources() -> None:
    host.needs_packages("typescript")
    checker = host.PACKAGES / "typescript" / "bin" / "tsc"
    command = ["node", checker, "-p", host.TREE / "jsconfig.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
