"""Typical acceptance (2401.10774 section 2.3.1), which is inexact, against a search through all
paths.
"""

from __future__ import annotations

import json
from math import exp, log, prod, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.bench.report import differences
from ssdevice.cli import main
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE
from ssdevice.runtime.sampling.choice import Chooser, walk
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session
from ssdevice.tree import Tree
from tests.runtime.tiny_bundle import tiny_bundle

TREES = ("chain:3", "full:k=2,depth=2", "full:k=3,depth=2", "[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]")
SIZE = 7


def published(
    paths: list[list[int]], rows: list[Any], temperature: float, epsilon: float
) -> list[tuple[int, float]]:
    """For each path of tokens: how many of its first are accepted, and their probability.

    ``rows``: of each path, the logits of the node before each of its tokens.
    """
    found = []
    for tokens, logits in zip(paths, rows, strict=True):
        accepted: list[float] = []
        for token, row in zip(tokens, logits, strict=True):
            scores = [exp(float(z) / temperature) for z in row]
            p = [score / sum(scores) for score in scores]
            entropy = -sum(each * log(each) for each in p if each)
            if p[token] <= min(epsilon, sqrt(epsilon) * exp(-entropy)):
                break
            accepted.append(p[token])
        found.append((len(accepted), prod(accepted)))
    return found


@given(st.integers(0, 10_000), st.sampled_from(TREES), st.floats(0.01, 0.9), st.floats(0.4, 2.0))
def test_the_path_is_the_longest_accepted_one(
    seed: int, spec: str, epsilon: float, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    tree = Tree.parse(spec)
    logits = (rng.normal(size=(tree.size, SIZE)) * 2).astype(np.float32)
    drafts = rng.integers(0, SIZE, (tree.depth, 3)).astype(np.int32)  # also the same token twice
    paths = []
    rows = []
    for ranks in tree.paths:
        paths.append([int(drafts[depth, rank]) for depth, rank in enumerate(ranks)])
        rows.append([logits[tree.paths.index(ranks[:depth])] for depth in range(len(ranks))])
    results = published(paths, rows, temperature, epsilon)
    chooser = Chooser(
        Sampling(temperature=temperature, typical_acceptance=epsilon, logprobs=0), [1], [0], SIZE
    )
    taken = chooser.typical(tree, drafts, logits)
    most = max(results)[0]
    assert (
        len(taken) == most + 1 and tree.paths[taken[-1]][:-1] == tree.paths[taken[-2]]
        if most
        else taken == [0]
    )
    best = max(likelihood for length, likelihood in results if length == most)
    assert results[taken[-1]] == (most, pytest.approx(best, rel=1e-4))
    # What follows is the choice at the end of the path, as without drafts, at its position in the
    # text.
    path, tokens = walk(tree, drafts, lambda node: chooser(logits[node]), taken)
    assert path[: len(taken)] == taken and tokens[:most] == paths[taken[-1]]
    plain = Chooser(Sampling(temperature=temperature), [1, *tokens[:most]], [0], SIZE)
    assert tokens[most] == plain(logits[taken[-1]])
    for node, token, found in zip(path, tokens, chooser.logprobs, strict=True):
        row = logits[node].astype(np.float64)
        assert found.chosen == pytest.approx(
            float(row[token] - np.log(np.exp(row).sum())), abs=1e-5
        )


def test_what_truncation_leaves_out_is_not_accepted() -> None:
    tree = Tree.chain(1)
    drafts = np.array([[2]], np.int32)
    logits = np.array([[3, 2, 1.9, 0], [0, 0, 0, 0]], np.float32)
    for asked, expected in (
        ({}, [0, 1]),
        ({"top_k": 3}, [0, 1]),
        ({"top_k": 2}, [0]),
        ({"top_p": 0.7}, [0]),
    ):
        chooser = Chooser(Sampling(temperature=1.0, typical_acceptance=0.1, **asked), [1], [3], 4)  # type: ignore[arg-type]
        assert chooser.typical(tree, drafts, logits) == expected


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 1.0}},
        {"suppress": (1,)},
        {"min_new_tokens": 3},
    ],
    ids=str,
)
def test_what_it_cannot_go_with_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="typical_acceptance goes with a temperature above 0"):
        Sampling(**{"temperature": 1.0, "typical_acceptance": 0.1} | asked)


def test_it_takes_more_drafts_and_says_that_it_is_inexact() -> None:
    with Session.open(tiny_bundle("int8", choose=True), threads=1) as session:

        def answer(mode: str, epsilon: float) -> tuple[list[int], float, bool]:
            sampling = Sampling(temperature=0.7, seed=3, typical_acceptance=epsilon, logprobs=1)
            session.reset()
            for _ in session.runs(
                session.prompt_ids("1 2 3"), max_tokens=40, mode=mode, sampling=sampling
            ):
                pass
            assert len(session.last.logprobs) == len(session.last.tokens)
            return session.last.tokens, session.last.tokens_per_step, session.last.inexact

        plain = answer("plain", 0)
        exact = answer(SPECULATIVE, 0)
        assert answer("plain", 1e-9) == plain and not plain[2]
        assert exact[0] == plain[0] and not exact[2]
        tokens, per_step, inexact = answer(SPECULATIVE, 1e-9)
        assert inexact and per_step > exact[1] and tokens != plain[0]
        assert answer(ADAPTIVE, 1e-9)[2]


def test_rows_that_are_not_numbers_are_an_error() -> None:
    tree = Tree.chain(1)
    drafts = np.array([[1]], np.int32)
    chooser = Chooser(Sampling(temperature=1.0, typical_acceptance=0.1), [1], [0], 4)
    logits = np.full((2, 4), np.nan, np.float32)
    taken = chooser.typical(tree, drafts, logits)
    with pytest.raises(BundleError, match="not numbers"):
        walk(tree, drafts, lambda node: chooser(logits[node]), taken)


def test_commands_mark_it(capsys: pytest.CaptureFixture[str]) -> None:
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
        "--temperature",
        "0.9",
    ]
    typical = ["--typical-acceptance", "0.1"]
    found = []
    for more in ([], typical):
        assert main([*asked, "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert "inexact" not in found[0] and found[1]["inexact"] is True
    assert main([*asked, *typical]) == 0
    assert "inexact: typical acceptance]" in capsys.readouterr().err
    assert main([*asked, *typical, "--no-speculate"]) == 2
    assert "--typical-acceptance has no effect: --no-speculate" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    *_, line = (
        part
        for part in capsys.readouterr().out.split("--")
        if part.startswith("typical-acceptance X")
    )
    assert "INEXACT" in line


def test_bench_marks_it() -> None:
    report: dict[str, Any] = {
        "sampling": {"temperature": 0.7},
        "differing_prompts": {},
        "prompts": 1,
    }
    assert differences(report) == []
    report["sampling"]["typical_acceptance"] = 0.09
    assert differences(report) == ["Inexact: typical acceptance changes the text"]
