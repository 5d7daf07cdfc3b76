"""The methods of ``research``: each gives the tokens of plain decoding, and drafts what its paper
says.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from research import methods, shapes, trees
from research.drafters import (
    Datastore,
    Lookahead,
    PromptLookup,
    Recycling,
    Rest,
    accepted,
    first_match,
    top,
)
from ssdevice.runtime.sampling.choice import walk
from ssdevice.tree import MISS, Tree
from tests.runtime import tiny_bundle as tiny

BUNDLES = ("chain-4", "bushy-16", "chains-3x5", "lookahead-16")
SMALL = [name for name, (bundle, _) in methods.METHODS.items() if bundle in BUNDLES]
CHOSEN = ["--methods", ";".join(SMALL)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of the small trees, prompts, and answers of an app."""
    folder = tmp_path_factory.mktemp("paper")
    model = ["--model", str(tiny.base_folder()), "--quant", "fp32", "--context", "96"]
    methods.main(["export", *model, "--out", str(folder / "bundles"), *CHOSEN])
    prompts = [{"prompt": text, "kind": text[:1]} for text in ("abcabc", "bca", "hello")]
    answers = [{"completion": text} for text in ("abcabcabc", "hello all", "bcabca")]
    for name, rows in (("prompts.jsonl", prompts), ("answers.jsonl", answers)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(folder: Path, results: Path) -> None:
    data = ["--data", str(folder / "prompts.jsonl"), "--store", str(folder / "answers.jsonl")]
    limits = ["--max-tokens", "40", "--threads", "1"]
    methods.main(
        ["run", str(folder / "bundles"), *data, "--results", str(results), *limits, *CHOSEN]
    )


def test_every_method_gives_plain_decodings_tokens_and_a_second_run_adds_what_is_missing(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    run(files, results)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == 3 * len(SMALL)
    for line in found:
        plain = next(
            each for each in found if (each["method"], each["prompt"]) == ("plain", line["prompt"])
        )
        assert (
            line["tokens"] == plain["tokens"]
            and 1 <= len(line["rows"]) == len(line["ms"]) <= len(plain["tokens"]) - 1
        )
    results.write_text("".join(json.dumps(line) + "\n" for line in found[:-2]))
    run(files, results)
    again = [json.loads(line) for line in results.read_text().splitlines()]
    assert again[:-2] == found[:-2]
    assert [line["tokens"] for line in again] == [line["tokens"] for line in found]
    capsys.readouterr()
    methods.main(["table", str(results)])
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in SMALL)


def test_another_answer_than_plain_decodings_ends_the_run(files: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    wrong = {
        "method": "plain",
        "prompt": 0,
        "kind": "",
        "tokens": [1, 2, 3],
        "rows": [1, 1],
        "ms": [1, 1],
    }
    results.write_text(json.dumps(wrong) + "\n")
    with pytest.raises(SystemExit, match="prompt 0: .* instead of"):
        run(files, results)


def test_prompt_lookup_copies_what_followed_the_first_occurrence_of_the_longest_end() -> None:
    assert first_match([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 3) == 3
    assert first_match([5, 2, 3, 9, 2, 3, 8, 1, 2, 3], 3) == 3
    assert first_match([1, 2, 3], 3) is None
    assert PromptLookup(4).draft([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]) == {1: 9, 2: 2, 3: 3, 4: 8}
    assert PromptLookup(4).draft([7, 1, 7]) == {1: 1, 2: 7}


def test_a_datastore_finds_what_a_search_through_all_answers_finds() -> None:
    random = np.random.default_rng(0)
    answers = [random.integers(0, 3, random.integers(1, 30)).tolist() for _ in range(40)]
    store = Datastore(answers)
    for length in range(1, 17):
        for _ in range(20):
            end = random.integers(0, 3, length).tolist()
            expected = [
                answer[at + length : at + length + 4]
                for answer in answers
                for at in range(len(answer) - length + 1)
                if answer[at : at + length] == end
            ]
            assert sorted(store.after(end, 4, 1000)) == sorted(expected)


def test_a_datastore_without_answers_finds_nothing() -> None:
    assert Datastore([]).after([1, 2], 4, 1000) == []


def test_rest_drafts_the_most_frequent_continuations_of_the_longest_end() -> None:
    store = Datastore(
        [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [2, 8], [2, 8], [2, 8], [2, 8]]
    )
    rest = Rest(store, Tree.of([[0], [1], [0, 0], [0, 1], [1, 0]]))
    assert rest.draft([9, 1, 2]) == {1: 3, 2: 6, 3: 4, 4: 5, 5: 7}
    assert rest.draft([9, 9]) == {}


def test_token_recycling_drafts_the_likeliest_tokens_after_each_token_of_the_last_rows() -> None:
    recycling = Recycling(Tree.of([[0], [1], [0, 0], [1, 0]]), k=2)
    logits = np.array(
        [[0, 3, 2, 0], [0, 0, 5, 4], [9, 0, 0, 8], [0, 0, 0, 0], [0, 0, 0, 0]], np.float32
    )
    recycling.learn([3, 1, 2, 2, 2], logits[[0, 1, 2, 2, 2]], [])
    assert recycling.draft([0, 3]) == {1: 1, 2: 2, 3: 2, 4: 0}


def test_the_top_of_each_row_is_that_of_a_whole_sort() -> None:
    logits = np.random.default_rng(0).permutation(5 * 1000).reshape(5, 1000).astype(np.float32)
    assert top(logits, 8) == np.argsort(-logits, axis=1)[:, :8].tolist()


def test_the_accepted_path_is_the_deepest_of_all_right_ones() -> None:
    tree = shapes.own_columns(shapes.chains(2, 2))
    assert accepted(tree, [0, 5, 5, 7, 6], [5, 7, 6, 1, 2]) == (0, 1, 3)
    assert accepted(tree, [0, 5, 5, 7, 6], [5, 6, 6, 1, 2]) == (
        0,
        2,
        4,
    )  # a walk that enters node 1 ends there
    drafts = np.array([[5, 5], [7, 6]], np.int32)
    assert walk(tree, drafts, [5, 6, 6, 1, 2].__getitem__) == ([0, 1], [5, 6])


@pytest.mark.parametrize("window, n, guesses", [(5, 3, 3), (4, 5, 2), (3, 2, 1)])
def test_a_row_of_lookaheads_window_sees_the_oldest_level_up_to_its_column_and_its_own_column(
    window: int, n: int, guesses: int
) -> None:
    tree, levels, chained = shapes.lookahead(window, n, guesses)
    assert tree.size == (window + guesses) * (n - 1)
    for level, column in product(range(n - 1), range(window)):
        node = tree.paths.index(levels[level][column])
        seen = {*levels[0][: column + 1], *(levels[below][column] for below in range(level + 1))}
        assert {
            tree.paths[other] for other in range(tree.size) if tree.ancestors[node][other]
        } == seen
        assert tree.depths[node] == level + column
    assert all(len(chain) == n - 1 for chain in chained)
    own = shapes.own_columns(tree)
    assert (own.parents, own.depths) == (tree.parents, tree.depths)


def test_lookahead_keeps_the_n_grams_of_its_window_and_moves_it_on() -> None:
    drafter = Lookahead(2, 3, 1)
    drafter.begin([1, 1, 1])
    assert set(drafter.draft([1, 1]).values()) == {1}
    tree, levels, _ = shapes.lookahead(2, 3, 1)
    best = [0] * tree.size
    for column, path in enumerate(levels[-1]):
        best[tree.paths.index(path)] = 5 + column
    drafter.learn([1] * tree.size, np.zeros((tree.size, 9), np.float32), best)
    drafted = drafter.draft([4, 1])  # the last n-gram that began with 1 was (1, 1, 6)
    tokens = [drafted.get(node, 1) for node in range(tree.size)]
    at = {path: token for path, token in zip(tree.paths, tokens, strict=True)}
    assert [at[0,], at[0, 0]] == [1, 6]
    assert [[at[path] for path in level] for level in levels] == [[1, 1], [5, 6]]


def test_sequoias_program_finds_the_best_of_all_trees() -> None:
    rates = [[0.6, 0.3], [0.5, 0.45]]
    every = list(Tree.full(2, 2).paths[1:])

    def value(tree: Tree) -> float:
        return sum(
            float(np.prod([rates[d][rank] for d, rank in enumerate(path)])) for path in tree.paths
        )

    for size in range(1, 8):
        possible = [
            Tree.of(path for path, kept in zip(every, bits, strict=True) if kept)
            for bits in product((0, 1), repeat=len(every))
            if sum(bits) == size - 1
            and all(
                not kept or len(path) == 1 or bits[every.index(path[:1])]
                for path, kept in zip(every, bits, strict=True)
            )
        ]
        found = shapes.sequoia(rates, size)
        assert found.size == size and value(found) == pytest.approx(max(map(value, possible)))


def test_choosers_of_trees_are_compared_at_equal_size() -> None:
    assert sorted(trees.expansions(4, 2, 3)) == [(), (1,), (1, 1), (1, 2), (2,), (3,)]
    assert trees.expanded((1, 2)) == Tree.of([[0], [0, 0], [0, 1]])
    answers = [[[0, 1], [1, 0], [0, MISS], [MISS, 0]]] * 4
    assert trees.rates(answers, 2, 2, by_depth=True) == [[0.5, 0.25], [1 / 3, 1 / 3]]
    assert trees.rates(answers, 2, 2, by_depth=False) == [[3 / 7, 2 / 7]] * 2
    assert all(1 <= found <= 3 for found in trees.compared(answers, 2, 2, 4))
