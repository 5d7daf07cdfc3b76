"""``research/pruning.py`` and ``rows.py``: which nodes pruning keeps, how it is counted, and that
they run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from research import pruning, rows
from research.answers import answered
from research.pruning import Exit, kept
from ssdevice.model import loading
from ssdevice.model.visibility import causal
from ssdevice.train.evaluation import stream_ranks
from ssdevice.tree import Tree, count_paths, tokens_per_step
from tests.runtime import tiny_bundle as tiny

K = 3
TREE = Tree.of([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)])
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), max_size=12)


def closed(paths: Sequence[tuple[int, ...]]) -> Tree:
    return Tree.of(path[:end] for path in paths for end in range(len(path) + 1))


@given(PATHS, st.data())
@settings(max_examples=200)
def test_kept_nodes_are_the_likeliest_closed_set(
    paths: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """Beside all sets of m nodes: the largest sum of products, the ancestors of each, ties to the
    lowest nodes.
    """
    tree = closed(paths)
    few = st.sampled_from([0.0, 0.25, 0.5, 1.0])  # whose products are exact, with many ties
    chances = [1.0, *data.draw(st.lists(few, min_size=tree.size - 1, max_size=tree.size - 1))]
    m = data.draw(st.integers(1, min(tree.size, 6)))
    found = kept(chances, tree.parents, m)
    product = [prod(chances[node] for node in {*path}) for path in tree.path_table]
    assert 0 in found and found == sorted(set(found)) and len(found) == m
    assert all(tree.parents[node] in found for node in found)
    if tree.size <= 14:
        expected = max(
            combinations(range(tree.size), m),
            key=lambda s: (sum(product[i] for i in s), [-i for i in s]),
        )
        of_the_best = sorted((product[node] for node in expected), reverse=True)
        assert sorted((product[node] for node in found), reverse=True) == of_the_best
        least = of_the_best[-1]
        ties = [node for node in range(tree.size) if product[node] == least]
        chosen = [node for node in found if product[node] == least]
        assert chosen == ties[: len(chosen)]


@given(PATHS, st.data())
def test_any_chances_keep_a_closed_set(paths: list[tuple[int, ...]], data: st.DataObject) -> None:
    tree = closed(paths)
    some = st.floats(0, 1)
    chances = data.draw(st.lists(some, min_size=tree.size, max_size=tree.size))
    for m in range(1, tree.size + 1):
        found = kept(chances, tree.parents, m)
        assert len(found) == m and 0 in found and all(tree.parents[node] in found for node in found)


@pytest.fixture(scope="module")
def model() -> Any:
    return (
        loading.load(tiny.base_folder(), Path(tiny.adapter_folder()), 96)
        .model.eval()
        .requires_grad_(False)
    )


@pytest.fixture(scope="module")
def answers(model: Any) -> list[pruning.Answer]:
    samples = answered(model.backbone, (), [[1, 5, 9, 3, 7], [2, 4, 6], [8, 8, 1, 3]], [20, 17, 3])
    return [pruning.read(model, sample, K) for sample in samples]


def test_answers_have_the_streams_ranks(model: Any, answers: list[pruning.Answer]) -> None:
    for answer in answers:
        (expected,) = stream_ranks(model, [answer.sample])
        assert answer.ranks == [
            [rank if rank < K else pruning.MISS for rank in row] for row in expected
        ]
        assert (
            len(answer.states) == len(answer.ranks) == len(answer.sample.ids) - answer.sample.prompt
        )


@torch.no_grad()
def test_chances_are_those_of_each_path_by_itself(
    model: Any, answers: list[pruning.Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each node: its parent's path as one sequence through the layers below, o and the streams'
    head.
    """
    noted: list[Sequence[float]] = []
    monkeypatch.setattr(
        pruning, "kept", lambda chances, parents, m: noted.append(chances) or list(range(m))
    )
    torch.manual_seed(2)
    found = Exit(model, 2)
    backbone = model.backbone
    assert found.term is not None
    torch.nn.init.normal_(found.term.up.weight, std=0.3)
    choose = pruning.by_exit(model, TREE, K, found, 4)
    for answer, at in ((answers[0], 0), (answers[0], 13), (answers[1], 5)):
        assert choose(answer, at) == [0, 1, 2, 3]
        ids = answer.sample.ids[: answer.sample.prompt + at + 1]
        drafts = answer.candidates[at].tolist()
        for node, path in enumerate(TREE.paths[1:], 1):
            tokens = torch.tensor(
                [[*ids, *(drafts[depth][rank] for depth, rank in enumerate(path))]]
            )
            positions = torch.arange(tokens.shape[1], dtype=torch.int32)
            masks = backbone.masks(lambda window, p=positions: causal(p, window)[None, None])
            h = backbone.embed(tokens, positions[None])
            h, _ = backbone.run(0, model.first_msa, h, backbone.rope(positions[None]), masks)
            state = h[0, -2]
            moved = state + found.term.up.weight @ (found.term.down.weight @ state)
            expected = torch.softmax(backbone.head(moved), -1)[tokens[0, -1]]
            assert noted[-1][node] == pytest.approx(float(expected), rel=1e-3, abs=1e-6)


def test_steps_are_counted_as_for_static_trees(model: Any, answers: list[pruning.Answer]) -> None:
    ranks = [answer.ranks for answer in answers]
    everything = tokens_per_step(ranks, TREE)
    assert pruning.tokens_a_step(answers, TREE, pruning.by_streams(TREE, TREE.size)) == everything
    assert (
        pruning.tokens_a_step(
            answers, TREE, pruning.by_exit(model, TREE, K, Exit(model, 0), TREE.size)
        )
        == everything
    )
    smaller = Tree.of(TREE.paths[:5])
    assert pruning.tokens_a_step(answers, TREE, lambda answer, at: range(5)) == tokens_per_step(
        ranks, smaller
    )
    best = Tree.from_counts(count_paths(ranks), 4)
    whole = Tree.of([*TREE.paths, *best.paths])
    assert tokens_per_step(ranks, best) <= tokens_per_step(ranks, whole)


def test_training_lowers_the_exits_loss(model: Any, answers: list[pruning.Answer]) -> None:
    states = torch.cat([answer.states for answer in answers])
    tokens = torch.tensor(
        [t for answer in answers for t in answer.sample.ids[answer.sample.prompt :]]
    )
    for alone in (False, True):
        torch.manual_seed(1)
        before = Exit(model, 8, alone).loss(states, tokens).item()
        torch.manual_seed(1)
        assert (
            pruning.trained(Exit(model, 8, alone), answers, 30, 0).loss(states, tokens).item()
            < before
        )


def test_the_scripts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": text, "completion": text}) + "\n" for text in ("abcab", "bca")
        )
    )
    files = [
        "--model",
        str(tiny.base_folder()),
        "--adapter",
        str(tiny.adapter_folder()),
        "--data",
        str(data),
    ]
    few = [
        "--limit",
        "2",
        "--dev-limit",
        "2",
        "--max-tokens",
        "8",
        "--k",
        "5",
        "--rank",
        "2",
        "--steps",
        "2",
    ]
    pruning.main([*files, "--dev", str(data), *few, "--pairs", "full:k=3,depth=2:5", "4:2"])
    shown = capsys.readouterr().out
    assert (
        "exit M + o(M), rank 2:" in shown
        and "| full:k=3,depth=2 | 13 | 5 |" in shown
        and "| 4 |" in shown
    )
    bundle = tiny.tiny_bundle().folder
    rows.main([str(bundle), "--rounds", "2", "--length", "20"])
    assert f"| {bundle.name} | {tiny.TREE.size} |" in capsys.readouterr().out
