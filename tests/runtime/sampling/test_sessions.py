"""The promise of sampling: for a seed, the same tokens and log-probabilities in every decoding
mode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssdevice.bundle.folder import BundleWriter
from ssdevice.bundle.sampling import ModelSampling
from ssdevice.cli import main
from ssdevice.contract import DRAFT, VERIFY, VERIFY_PLAIN
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session
from tests.runtime.sampling.promise import SAMPLERS, agree, check_forced_drafts
from tests.runtime.tiny_bundle import tiny_bundle


@pytest.fixture(scope="module", params=["fp32", "int8"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    with Session.open(tiny_bundle(request.param, choose=True), threads=1) as opened:
        yield opened


@pytest.mark.parametrize("sampling", SAMPLERS, ids=range(len(SAMPLERS)))
def test_forced_drafts_end_at_every_node_and_change_nothing(
    session: Session, sampling: Sampling
) -> None:
    # Without our kernels a node's ancestors stand in other columns than in plain decoding.
    assert check_forced_drafts(session.engine, sampling) == {1, 2, 3, 4}


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "lookup"])
def test_every_mode_gives_the_same_answer(streams: bool) -> None:
    bundle = tiny_bundle("int8", streams, repeats=0 if streams else 3, choose=True)
    assert {VERIFY, VERIFY_PLAIN} <= bundle.functions.keys()
    with Session.open(bundle, threads=1) as session:
        assert (DRAFT in session.engine.functions) is streams
        for seed, sampling in product(range(2), SAMPLERS):
            chosen = Sampling(**{**vars(sampling), "seed": seed})
            found = []
            for mode in ("plain", SPECULATIVE, ADAPTIVE):
                for _ in session.runs(
                    session.prompt_ids("2 3 2 3 2 3"), max_tokens=40, mode=mode, sampling=chosen
                ):
                    pass
                found.append((session.last.tokens, session.last.text, session.last.logprobs))
                assert len(session.last.logprobs) == len(session.last.tokens)
            for tokens, text, logprobs in found[1:]:
                assert (tokens, text) == found[0][:2]
                agree(
                    logprobs, found[0][2], exactly=not streams
                )  # a chain has the bits of plain decoding


def test_a_seed_decides_the_answer_and_a_conversation_goes_on(session: Session) -> None:
    def chat(seed: int, speculate: bool) -> list[str]:
        session.reset()
        sampling = Sampling(temperature=1.0, seed=seed)
        return [
            "".join(session.chat(text, max_tokens=12, speculate=speculate, sampling=sampling))
            for text in "123"
        ]

    assert chat(1, True) == chat(1, False) == chat(1, True)
    assert len({tuple(chat(seed, True)) for seed in range(4)}) > 1


def test_an_answer_that_was_given_up_leaves_nothing_behind(session: Session) -> None:
    """Neither its chooser nor its drafts: greedy answers are the graph's again."""
    greedy = list(session.generate("1 2", max_tokens=10))
    given_up = session.generate("4 5", max_tokens=10, sampling=Sampling(temperature=5.0, seed=3))
    next(given_up)
    assert list(session.generate("1 2", max_tokens=10)) == greedy
    with pytest.raises(InputError, match="ended by a newer one"):
        list(given_up)


def test_what_a_bundle_or_mode_cannot_do_is_said(session: Session) -> None:
    asked = Sampling(temperature=1.0)
    with (
        Session.open(tiny_bundle(), threads=1) as other,
        pytest.raises(InputError, match="--choose host"),
    ):
        other.generate("1", sampling=asked)
    with pytest.raises(InputError, match="choose 'plain'"):
        session.runs([1], mode="plain_step", sampling=asked)
    assert list(session.generate("1", max_tokens=3, sampling=Sampling())) == list(
        session.generate("1", max_tokens=3)
    )


def test_a_session_lives_on_after_requests_that_fail(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(**asked: Any) -> str:
        return "".join(
            session.generate(
                "1 2 3", max_tokens=9, sampling=Sampling(**{"temperature": 0.9, "seed": 1} | asked)
            )
        )

    expected = ask()
    vocab = session.engine.geometry.vocab
    never = np.full(vocab, -np.inf, np.float32)
    for wrong, error in (
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"top_k": -1}, "top_k"),
        ({"logit_bias": {vocab: 1.0}}, "not one of"),
        ({"suppress": tuple(range(vocab))}, "forbids every token"),
        ({"processors": (lambda ids, scores: never,)}, "forbids every token"),
        ({"processors": (lambda ids, scores: None,)}, "a processor returned"),
        ({"processors": (lambda ids, scores: scores[1:],)}, "a processor returned"),
        ({"processors": (lambda ids, scores: scores * np.nan,)}, "a processor returned .* NaN"),
        ({"processors": (lambda ids, scores: scores + np.inf,)}, "a processor returned .* NaN"),
    ):
        with pytest.raises(InputError, match=error):
            ask(**wrong)
        assert ask() == expected
    named = f"{re.escape(str(session.engine.source))}: the model returned logits that are not"
    for value in (np.nan, np.inf, 1e38):
        with monkeypatch.context() as patch:
            logits = Conversation._logits
            patch.setattr(
                Conversation,
                "_logits",
                lambda *given: logits(*given) * np.float32(value),  # noqa: B023
            )
            with np.errstate(over="ignore"), pytest.raises(BundleError, match=named):
                ask()
        assert ask() == expected


def test_penalties_know_a_prefix_that_was_reused(session: Session) -> None:
    asked = Sampling(
        temperature=0.5,
        repetition_penalty=2.0,
        no_repeat_ngram_size=2,
        frequency_penalty=0.5,
        seed=8,
    )
    long = [5, 6, 5, 7, 5, 6, 8, 9, 10, 3]
    other = [5, 6, 5, 7, 5, 6, 8, 9, 11]

    def tokens(ids: list[int]) -> list[int]:
        for _ in session.runs(ids, max_tokens=20, sampling=asked):
            pass
        return session.last.tokens

    session.reset()
    expected = tokens(other)
    tokens(long)
    assert session._conversation.shared(other) == 8 and tokens(other) == expected


def test_run_samples(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(tiny_bundle("int8", choose=True).folder)
    asked = [
        "run",
        bundle,
        "--prompt",
        "1 2",
        "--max-tokens",
        "9",
        "--threads",
        "1",
        "--json",
        "--temperature",
        "0.9",
    ]
    found = []
    four = ["--seed", "4", "--logprobs", "2"]
    for more in (four, [*four, "--no-speculate"], ["--seed", "5"]):
        assert main([*asked, *more, "--top-p", "0.95", "--logit-bias", "7=-5"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"] != found[2]["tokens"]
    assert found[0]["logprobs"] == found[1]["logprobs"] and len(found[0]["logprobs"][0]["ids"]) == 2
    for wrong in (
        ["--seed", "18446744073709551616"],
        ["--temperature", "-1"],
        ["--top-p", "0"],
        ["--logit-bias", "x"],
        ["--logit-bias", "99999=1"],
    ):
        assert main([*asked, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_what_is_not_asked_for_is_as_the_model_recommends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelSampling(True, temperature=0.6, top_k=9, repetition_penalty=1.4, suppress=(4,))
    bundle = tiny_bundle("int8", choose=True)
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_bundle(bundle)
        writer.commit(replace(bundle.manifest, sampling=model))
    with Session.open(tmp_path / "b", threads=1) as opened:
        expected = Sampling(temperature=0.6, top_k=0, repetition_penalty=1.4, suppress=(4,), seed=5)
        assert opened.sampling(top_k=0, seed=5) == expected
    with Session.open(bundle, threads=1) as opened:
        assert opened.sampling(top_p=0.9) == Sampling(temperature=1.0, top_p=0.9)

    def run(*more: str) -> list[int]:
        call = [
            "run",
            str(tmp_path / "b"),
            "--prompt",
            "1 2",
            "--max-tokens",
            "20",
            "--threads",
            "1",
            "--json",
        ]
        assert main([*call, *more]) == 0
        said = capsys.readouterr()
        assert ("temperature=0.6" in said.err) is not bool(more)
        tokens: list[int] = json.loads(said.out)["tokens"]
        return tokens

    named = ["--temperature", "0.6", "--top-k", "9", "--repetition-penalty", "1.4"]
    assert (
        run("--sample")
        == run("--seed", "0")
        == run(*named)
        != run("--top-k", "0")
        != run("--seed", "1")
    )
    assert run("--temperature", "0") == run("--logprobs", "1") == run()
    assert main(["inspect", str(tmp_path / "b")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "do_sample yes" in said and "temperature 0.6" in said
    for off in (["--sample"], ["--top-p", "0.5"], ["--seed", "3"]):
        assert main(["run", str(tmp_path / "b"), "--prompt", "1", "--temperature", "0", *off]) == 2
        assert f"{off[0]} has no effect: --temperature 0" in capsys.readouterr().err


def test_bench_measures_sampling() -> None:
    from ssdevice.bench.runner import BenchOptions, measure
    from ssdevice.data import Example

    asked = BenchOptions(rounds=2, max_tokens=12, sampling=Sampling(temperature=0.8, seed=2))
    with Session.open(tiny_bundle("int8", choose=True), threads=1) as opened:
        found = measure(opened, [Example("1 2 3"), Example("4 5")], asked, lambda *_: None)
    assert found.equal and set(found.modes) == {"plain", SPECULATIVE, ADAPTIVE}
