"""The static draft trees of methods that need no training, as trees that a bundle can have.

A bundle's node takes a candidate of its depth, whatever its parent. So each node of a depth has a column of its own
here (``own_columns``): a method may then put any token at any node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from ssdevice.tree import Ranks, Tree

RATES = (0.45, 0.15, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)
"""How often a candidate of each rank is right where nothing was measured: the first often, the others by a power."""
DEPTH = 6
"""Of the trees of token recycling (2408.08696) and, here, of REST."""


def own_columns(tree: Tree) -> Tree:
    """The same topology, where node n of a depth takes candidate n of that depth."""
    columns: dict[Ranks, Ranks] = {(): ()}
    seen: Counter[int] = Counter()
    for path in tree.paths[1:]:
        columns[path] = (*columns[path[:-1]], seen[len(path)])
        seen[len(path)] += 1
    return Tree.of(columns.values())


def sequoia(rates: Sequence[Sequence[float]], size: int) -> Tree:
    """The tree of ``size`` nodes that emits most tokens a step, by Sequoia's dynamic program (2402.12374).

    ``rates [γ, k]``: how often the child of each rank is right once its parent is, for parents of each depth; that the
    ranks above it do not matter is what the program assumes. Sequoia has one row for all depths.
    """
    gamma, k = len(rates), len(rates[0])

    @cache
    def below(nodes: int, rank: int, depth: int) -> tuple[float, tuple[int, ...]]:
        """The best of ``nodes`` nodes as children, from ``rank`` on, of a node at ``depth``: value, sizes by rank."""
        if not nodes or rank == k or depth == gamma:
            return 0.0, ()
        found = []
        for mine in range(1, nodes + 1):
            rest, sizes = below(nodes - mine, rank + 1, depth)
            found.append(
                (rates[depth][rank] * (1 + below(mine - 1, 0, depth + 1)[0]) + rest, (mine, *sizes))
            )
        return max(found)

    def paths(nodes: int, at: Ranks) -> list[Ranks]:
        sizes = below(nodes, 0, len(at))[1]
        return [
            at,
            *(path for rank, mine in enumerate(sizes) for path in paths(mine - 1, (*at, rank))),
        ]

    return Tree.of(paths(size - 1, ()))


def bushy(size: int) -> Tree:
    """The tree of token recycling and REST: the ``size`` nodes that emit most by RATES, DEPTH deep at most."""
    return sequoia([RATES] * DEPTH, size)


def chains(count: int, depth: int) -> Tree:
    """Chains below the root."""
    return Tree.of((first, *[0] * below) for first in range(count) for below in range(depth))


def lookahead(
    window: int, n: int, guesses: int
) -> tuple[Tree, list[list[Ranks]], list[list[Ranks]]]:
    """The rows of a step of Lookahead (2402.02057, figure 2) as a tree: (window + guesses) * (n - 1) with the root.

    Returns the tree, the paths of the window by level (n - 1, the oldest first) and column, and those of each guess.
    Below the root hang ``guesses`` chains of n - 1 tokens, which are verified, and the window: its oldest level is the
    root and a chain of window - 1 tokens, and at each of these hangs its column, a chain of the n - 2 newer levels. So
    a row sees the oldest level up to its column, and its own column.
    """
    oldest = [(guesses, *[0] * at)[:at] for at in range(window)]
    columns = [(*path, 1 if path else guesses + 1) for path in oldest]
    levels = [oldest, *([(*path, *[0] * level) for path in columns] for level in range(n - 2))]
    chained = [[(guess, *[0] * level) for level in range(n - 1)] for guess in range(guesses)]
    return Tree.of(path for paths in (*levels, *chained) for path in paths), levels, chained
