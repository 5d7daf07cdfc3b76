"""Draft trees against a reference that knows nothing but prefixes of rank paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.errors import ConfigError
from ssdevice.tree import MAX_NODES, Ranks, Tree

ranks = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


def closed(paths: list[Ranks]) -> list[Ranks]:
    """The paths and all their prefixes."""
    return [path[:d] for path in paths for d in range(len(path) + 1)]


trees = st.lists(ranks, max_size=8).map(closed).map(Tree.of)


def is_prefix(a: Ranks, b: Ranks) -> bool:
    return list(a) == list(b)[: len(a)]


def test_example_of_the_module_docstring() -> None:
    tree = Tree(((), (0,), (1,), (0, 0)))
    assert tree.parents == (0, 0, 0, 1)
    assert tree.depths == (0, 1, 1, 2)
    assert tree.path_table == ((0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 1, 3))
    assert (tree.size, tree.depth, tree.width, tree.emitted) == (4, 2, 2, 3)
    assert tree.draft_indices(k=2) == (0, 1, 2, 3)


@given(trees)
def test_parent_is_the_longest_proper_prefix(tree: Tree) -> None:
    for i, path in enumerate(tree.paths):
        shorter = [
            j
            for j, other in enumerate(tree.paths)
            if len(other) < len(path) and is_prefix(other, path)
        ]
        expected = max(shorter, key=lambda j: len(tree.paths[j])) if path else i
        assert tree.parents[i] == expected
        assert tree.depths[i] == (tree.depths[expected] + 1 if path else 0)
        assert (
            tree.parents[i] < i or i == 0
        )  # parents first: one pass over the nodes is enough to verify


@given(trees)
def test_ancestors_are_the_nodes_whose_path_is_a_prefix(tree: Tree) -> None:
    for node, path in enumerate(tree.paths):
        assert tree.ancestors[node] == tuple(is_prefix(other, path) for other in tree.paths)
    assert len(tree.ancestors) == tree.size


@given(trees)
def test_path_table_walks_from_the_root_and_stays_at_the_node(tree: Tree) -> None:
    for i in range(tree.size):
        walk = [i]
        while walk[0] != 0:
            walk.insert(0, tree.parents[walk[0]])
        assert tree.path_table[i] == (*walk, *[i] * (tree.emitted - len(walk)))


@given(trees)
def test_sizes(tree: Tree) -> None:
    assert tree.size == len(set(tree.paths))
    assert tree.depth == max(map(len, tree.paths))
    assert tree.emitted == tree.depth + 1
    assert all(rank < tree.width for path in tree.paths for rank in path)
    assert tree.width == 1 or any(tree.width - 1 in path for path in tree.paths)


@given(trees, st.integers(0, 3))
def test_token_slots_gather_candidate_r_of_stream_d(tree: Tree, spare: int) -> None:
    k = tree.width + spare
    flat: list[object] = ["root", *product(range(1, tree.depth + 1), range(k))]
    tokens = [flat[slot] for slot in tree.draft_indices(k)]
    assert tokens == ["root", *((len(path), path[-1]) for path in tree.paths[1:])]


def test_token_slots_refuse_too_few_candidates() -> None:
    with pytest.raises(ConfigError, match="candidate 2 .* k = 2"):
        Tree.of([(2,)]).draft_indices(k=2)


@given(trees, st.randoms())
def test_of_takes_any_order_and_constructor_only_breadth_first(tree: Tree, random: object) -> None:
    shuffled = list(tree.paths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert Tree.of(shuffled) == tree
    assert list(tree.paths) == sorted(tree.paths, key=lambda p: (len(p), p))
    if tuple(shuffled) != tree.paths:
        with pytest.raises(ConfigError):
            Tree(tuple(shuffled))


@given(trees)
def test_json_round_trip(tree: Tree) -> None:
    assert Tree.parse(json.dumps(tree.to_json())) == tree


def test_named_shapes() -> None:
    assert Tree.parse("chain:3").paths == ((), (0,), (0, 0), (0, 0, 0))
    assert Tree.parse(" full:k=2,depth=2 ").paths == (
        (),
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    )
    assert Tree.parse("full:depth=1,k=3") == Tree.full(3, 1)
    assert (
        Tree.root_only().paths
        == ((),)
        == Tree.chain(0).paths
        == Tree.full(5, 0).paths
        == Tree.parse("[]").paths
    )
    assert Tree.full(1, 4) == Tree.chain(4)
    assert Tree.chain(MAX_NODES - 1).size == MAX_NODES


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "",
            "chain",
            "chain:",
            "chain:0",
            "chain:-1",
            "chain:x",
            "chain:1.5",
            "chain:1_0",
            "chain:4 4",
        ),
        *(
            "full:",
            "full:k=2",
            "full:k=2,k=2,depth=1",
            "full:k=2,depth=1,x=1",
            "full:k,depth",
            "full:k=0,depth=1",
        ),
        *("chain:256", "full:k=2,depth=8", "full:k=300,depth=1"),
        *(
            "chain:" + "9" * 12,
            "chain:" + "9" * 5000,
            "full:k=1,depth=" + "9" * 9,
            "full:k=9,depth=" + "9" * 9,
        ),
        *(
            "[",
            "[[0]",
            "{}",
            "[0]",
            "[[0.0]]",
            "[[true]]",
            '[["0"]]',
            "[[-1]]",
            "[[0,0]]",
            "[null]",
            "[" * 100_000,
        ),
        *("[[" + "1" * 5000 + "]]", json.dumps([[i] for i in range(MAX_NODES)])),
        *("no/such/file", "x" * 100_000, "nul\0byte", "."),
    ],
    ids=lambda spec: repr(spec[:20]),
)
def test_parse_refuses_in_one_readable_line(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tree.parse(spec)
    assert 10 < len(str(caught.value)) < 600


def test_parse_reads_a_file_once(tmp_path: Path) -> None:
    file = tmp_path / "best.tree"
    file.write_text("\n[[0], [1], [0, 0]]\n", "utf-8")
    assert Tree.parse(str(file)).paths == ((), (0,), (1,), (0, 0))
    file.write_text("chain:2", "utf-8")
    assert Tree.parse(str(file)) == Tree.chain(2)
    file.write_text(str(file), "utf-8")
    with pytest.raises(ConfigError, match="starts with"):
        Tree.parse(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Tree.parse(str(file))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "root"),
        (((0,),), "root"),
        (((), (0, 0)), "no parent"),
        (((), (0,), (0,)), "twice"),
        (((), (1,), (0,)), "breadth-first"),
        (((), (-1,)), "0 or more"),
        (((), *((i,) for i in range(MAX_NODES))), "at most"),
    ],
)
def test_constructor_names_the_fault(paths: tuple[Ranks, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tree(paths)


def test_check_against_streams() -> None:
    tree = Tree.full(2, 2)
    tree.check(gamma=2, k=2)
    with pytest.raises(ConfigError, match="2 deep .* γ = 1"):
        tree.check(gamma=1, k=2)
    with pytest.raises(ConfigError, match="candidate 1 .* k = 1"):
        tree.check(gamma=2, k=1)


def accepted(paths: frozenset[Ranks], observed: dict[Ranks, int]) -> int:
    """Draft tokens a tree accepts: for each observation the depth of the last node on its path."""
    found = 0
    for path, times in observed.items():
        found += times * max(d for d in range(len(path) + 1) if path[:d] in paths)
    return found


SMALL = [path for depth in (1, 2, 3) for path in product(range(2), repeat=depth)]


def subtrees(size: int) -> list[frozenset[Ranks]]:
    """All trees of so many nodes, in SMALL and the root."""
    found = []
    for chosen in combinations(SMALL, size - 1):
        nodes = frozenset(((), *chosen))
        if all(path[:-1] in nodes for path in chosen):
            found.append(nodes)
    return found


SUBTREES = {size: subtrees(size) for size in range(1, 6)}


@given(st.dictionaries(st.sampled_from(SMALL), st.integers(0, 9), max_size=6), st.integers(1, 5))
def test_from_counts_accepts_as_much_as_the_best_of_all_trees(
    observed: dict[Ranks, int], size: int
) -> None:
    tree = Tree.from_counts(observed, size)
    assert tree.size <= size
    best = max(
        accepted(paths, observed) for smaller in range(1, size + 1) for paths in SUBTREES[smaller]
    )
    assert accepted(frozenset(tree.paths), observed) == best
    # No node that nothing was observed at.
    for path in tree.paths[1:]:
        assert any(times and is_prefix(path, seen) for seen, times in observed.items())


@given(st.dictionaries(ranks, st.integers(0, 100), max_size=10))
def test_from_counts_grows_node_by_node(observed: dict[Ranks, int]) -> None:
    sizes = [Tree.from_counts(observed, size) for size in range(1, 8)]
    for smaller, larger in pairwise(sizes):
        assert set(smaller.paths) <= set(larger.paths)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Tree.from_counts({(0,): 1}, 0),
        lambda: Tree.from_counts({(0,): 1}, MAX_NODES + 1),
        lambda: Tree.from_counts({(0,): -1}, 2),
    ],
)
def test_from_counts_refuses(build: Callable[[], Tree]) -> None:
    with pytest.raises(ConfigError):
        build()


def test_trees_are_values() -> None:
    a = Tree.chain(2)
    b = Tree.of([(0, 0), (0,)])
    assert a == b and hash(a) == hash(b) and a != Tree.chain(3)
    assert a.parents is a.parents  # computed once
