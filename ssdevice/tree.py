"""Draft trees: a fixed topology and its constant tables (2402.11131 section 3.2.2).

A tree is a tuple of rank paths in breadth-first order. The path ``(r1, .., rd)`` is the node at
depth d that is reached by taking candidate r1 of stream 1, candidate r2 of stream 2 and so on;
``()`` is the root, the last token of the main stream.

With γ = 2 streams and k = 2 candidates each, this tree::

    ()            node 0, the root
    (0,) (1,)     nodes 1, 2: stream 1's candidates
    (0, 0)        node 3: stream 2's best candidate below node 1

has these tables::

    parents       (0, 0, 0, 1)
    depths        (0, 1, 1, 2)
    path table    ((0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 1, 3))
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, takewhile
from pathlib import Path
from typing import Any, Self

from ssdevice.errors import ConfigError

MAX_NODES = 256
FORMS = "chain:DEPTH, full:k=K,depth=D or a JSON list of rank paths such as [[0],[1],[0,0]]"
STARTS = ("chain:", "full:", "[")
"""What each of the FORMS starts with; anything else names a file."""
_SIZE = r"0*([1-9]\d{0,3})"
Ranks = tuple[int, ...]
MISS = 1 << 20
"""Rank of a token that was no candidate, or that does not exist because the answer ended."""
AnswerRanks = Sequence[Sequence[int]]
"""For each token i of an answer: the ranks ``[γ]`` of tokens i+1..i+γ in streams 1..γ."""


@dataclass(frozen=True)
class Tree:
    """A static draft tree: ``paths`` are rank paths, breadth first, beginning with the root ``()``.

    Raises ConfigError if a parent is missing, a path repeats, the order is not breadth first or
    there are more than MAX_NODES nodes.
    """

    paths: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        if not self.paths or self.paths[0] != ():
            raise ConfigError("a draft tree starts with its root, the empty path []")
        if len(self.paths) > MAX_NODES:
            raise ConfigError(
                f"a draft tree has at most {MAX_NODES} nodes, this one has {len(self.paths)}"
            )
        known: set[Ranks] = set()
        for path in self.paths:
            shown = str(list(path))[:60]
            if any(rank < 0 for rank in path):
                raise ConfigError(f"tree path {shown}: ranks are 0 or more")
            if path in known:
                raise ConfigError(f"tree path {shown} appears twice")
            if path and path[:-1] not in known:
                raise ConfigError(f"tree path {shown} has no parent before it")
            known.add(path)
        if _breadth_first(self.paths) != self.paths:
            raise ConfigError("tree paths are not in breadth-first order; build trees with Tree.of")

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> Self:
        """The tree with these rank paths in any order; the root may be left out."""
        unique = {(), *map(tuple, paths)}
        return cls(_breadth_first(unique))

    @classmethod
    def root_only(cls) -> Self:
        """One node: the tree of plain decoding."""
        return cls(((),))

    @classmethod
    def chain(cls, depth: int) -> Self:
        """The best candidate of each of ``depth`` streams: depth + 1 nodes."""
        if not 0 <= depth < MAX_NODES:
            raise ConfigError(f"chain:{depth} does not have 1..{MAX_NODES} nodes")
        return cls(tuple((0,) * d for d in range(depth + 1)))

    def levels(self, depth: int) -> Self:
        """The tree down to a depth."""
        return type(self)(tuple(path for path in self.paths if len(path) <= depth))

    @classmethod
    def full(cls, k: int, depth: int) -> Self:
        """Every path over ``k`` candidates: 1 + k + k² + .. nodes."""
        # The bound on depth comes first: k**depth of untrusted numbers may not fit into memory.
        if k < 1 or not 0 <= depth < MAX_NODES or sum(k**d for d in range(depth + 1)) > MAX_NODES:
            raise ConfigError(f"full:k={k},depth={depth} does not have 1..{MAX_NODES} nodes")
        return cls.of(path for d in range(depth + 1) for path in product(range(k), repeat=d))

    @classmethod
    def from_counts(cls, observed: Mapping[Ranks, int], size: int) -> Self:
        """The tree of at most ``size`` nodes that accepts most on observed rank paths.

        ``observed`` counts, over verified positions, the ranks of the true next tokens in streams
        1, 2, ..; a path ends before the first token that was not a candidate. A node is accepted as
        often as its path is a prefix of an observed one, so the most frequent prefixes are optimal,
        without assuming independent streams. Prefixes that were never observed get no node. Raises
        ConfigError for a size outside 1..MAX_NODES or a negative count.
        """
        if not 1 <= size <= MAX_NODES:
            raise ConfigError(f"a draft tree has 1..{MAX_NODES} nodes, {size} were requested")
        prefixes: Counter[Ranks] = Counter()
        for path, times in observed.items():
            if times < 0:
                raise ConfigError(
                    f"path {list(path)} was observed {times} times, expected 0 or more"
                )
            for d in range(1, len(path) + 1):
                prefixes[path[:d]] += times
        seen = [path for path, times in prefixes.items() if times]
        best = sorted(seen, key=lambda path: (-prefixes[path], len(path), path))
        return cls.of(best[: size - 1])

    @classmethod
    def parse(cls, spec: str) -> Self:
        """A tree in one of the FORMS, or from a file with one.

        Raises ConfigError, which lists them.
        """
        text = spec.strip()
        if not text.startswith(STARTS):
            text = _read_spec(text)
        if text.startswith("["):
            try:
                return cls.of(_paths(json.loads(text)))
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"tree {text[:60]!r} is not a JSON list of rank paths: {error}"
                ) from error
        chain = re.fullmatch(f"chain:{_SIZE}", text, re.ASCII)
        if chain is not None:
            return cls.chain(int(chain[1]))
        full = re.fullmatch(f"full:k={_SIZE},depth={_SIZE}", text, re.ASCII)
        if full is not None:
            return cls.full(k=int(full[1]), depth=int(full[2]))
        swapped = re.fullmatch(f"full:depth={_SIZE},k={_SIZE}", text, re.ASCII)
        if swapped is not None:
            return cls.full(k=int(swapped[2]), depth=int(swapped[1]))
        raise ConfigError(
            f"tree {text[:60]!r}: expected {FORMS}, with numbers that make 1..{MAX_NODES} nodes"
        )

    def check(self, gamma: int, k: int) -> None:
        """Raise ConfigError unless γ streams with k candidates each can fill the tree."""
        if self.depth > gamma:
            raise ConfigError(
                f"the tree is {self.depth} deep but there are only γ = {gamma} streams"
            )
        if self.width > k:
            raise ConfigError(
                f"the tree uses candidate {self.width - 1} but streams have k = {k} (0..{k - 1})"
            )

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The tree that ``to_json`` wrote.

        Raises ConfigError, also for paths that repeat or are out of order.
        """
        return cls(((), *map(tuple, _paths(value))))

    def to_json(self) -> list[list[int]]:
        """The rank paths below the root, as ``parse`` reads them."""
        return [list(path) for path in self.paths[1:]]

    @property
    def size(self) -> int:
        """T, the number of nodes."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Depth of the deepest node (root 0)."""
        return len(self.paths[-1])

    @property
    def width(self) -> int:
        """k, the number of candidates that each stream must have."""
        return 1 + max((rank for path in self.paths for rank in path), default=0)

    @property
    def emitted(self) -> int:
        """A = depth + 1, the most tokens one step can emit."""
        return self.depth + 1

    @property
    def is_chain(self) -> bool:
        """Whether every depth has one node.

        The nodes of an accepted path are then the first ones.
        """
        return self.size == self.emitted

    @cached_property
    def _index(self) -> dict[Ranks, int]:
        return {path: i for i, path in enumerate(self.paths)}

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """[T] parent of each node; the root is its own."""
        return tuple(self._index[path[:-1]] for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[T] depth of each node."""
        return tuple(len(path) for path in self.paths)

    @cached_property
    def path_table(self) -> tuple[tuple[int, ...], ...]:
        """[T, A] node indices from the root to each node, padded with the node itself."""
        table = list[tuple[int, ...]]()
        for path in self.paths:
            # A slice that ends beyond the path is the path itself: the padding.
            table.append(tuple(self._index[path[:depth]] for depth in range(self.emitted)))
        return tuple(table)

    @cached_property
    def ancestors(self) -> tuple[tuple[bool, ...], ...]:
        """[T, T] the tree's part of the mask: row i is true for node i and its ancestors.

        See 2402.11131 eq. 4.
        """
        table = list[tuple[bool, ...]]()
        for path in self.path_table:
            seen = set(path)
            table.append(tuple(node in seen for node in range(self.size)))
        return tuple(table)

    def draft_indices(self, k: int) -> tuple[int, ...]:
        """[T] index of each node's token in ``concat(root, drafts[γ, k] row by row)``.

        ConfigError if k < width.
        """
        if k < self.width:
            raise ConfigError(f"the tree uses candidate {self.width - 1} but streams have k = {k}")
        indices = [0]  # the root's
        for path in self.paths[1:]:
            stream = len(path) - 1
            rank = path[-1]
            indices.append(1 + stream * k + rank)
        return tuple(indices)


def count_paths(answers: Sequence[AnswerRanks]) -> Counter[Ranks]:
    """How often each rank path occurred, cut before the first MISS: see Tree.from_counts."""
    counts = Counter[Ranks]()
    for answer in answers:
        for row in answer:
            counts[tuple(takewhile(lambda rank: rank < MISS, row))] += 1
    return counts


def tokens_per_step(answers: Sequence[AnswerRanks], tree: Tree) -> float:
    """β for these answers with ``tree``: tokens emitted by steps over steps."""
    known = set(tree.paths)
    emitted = 0
    steps = 0
    for answer in answers:
        at = 0
        last = len(answer) - 1
        while at < last:
            accepted = max(d for d in range(tree.depth + 1) if tuple(answer[at][:d]) in known)
            taken = min(accepted + 1, last - at)
            at += taken
            emitted += taken
            steps += 1
    return emitted / max(steps, 1)


def _breadth_first(paths: Iterable[Ranks]) -> tuple[Ranks, ...]:
    """Rank paths by depth, and by ranks within a depth."""
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _read_spec(name: str) -> str:
    """The tree in one of the FORMS that a file holds; raises ConfigError."""
    try:
        content = Path(name).read_text("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"tree file {name[:200]} is not UTF-8 text") from error
    except (OSError, ValueError) as error:  # no such file, or no possible name of one
        raise ConfigError(
            f"tree {name[:200]!r}: expected {FORMS}, or a file that holds one"
        ) from error
    if not content.startswith(STARTS):  # a file names no other file: it could name itself
        raise ConfigError(
            f"tree file {name[:200]!r} starts with {content[:40]!r}, expected {FORMS}"
        )
    return content


def _paths(value: Any) -> list[list[int]]:
    """The rank paths in a value from JSON; raises ConfigError if it is no list of them."""
    if not isinstance(value, list) or not all(map(_is_path, value)):
        raise ConfigError("a tree in JSON is a list of lists of ranks, such as [[0],[1],[0,0]]")
    return value


def _is_path(value: Any) -> bool:
    """Whether a value from JSON is a list of integers, of which ``true`` is none."""
    return isinstance(value, list) and all(type(rank) is int for rank in value)
