"""Drafters that need no training, one small class each: the tokens of a conversation in, the tokens of a tree out.

A drafter never changes the answer, because every call checks what it drafts against the model's own tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from research import shapes
from ssdevice.runtime.conversation import Conversation
from ssdevice.tree import Tree

Logits = NDArray[np.float32]
NGram = tuple[int, ...]


class Drafter:
    """Drafts for the nodes of a ``tree``, and an ``Advance`` of the product's loop that verifies them.

    ``learns``: whether ``learn`` is called after each step, for which the host reads the logits of all rows.
    """

    learns = False

    def __init__(self, tree: Tree) -> None:
        self.tree = shapes.own_columns(tree)
        self._places = [(len(path) - 1, path[-1]) for path in self.tree.paths[1:]]

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last answer. What was learned from all answers stays."""

    def draft(self, text: list[int]) -> Mapping[int, int]:
        """What nodes 1 to T - 1 hold after ``text``, the prompt and the answer so far; nothing: a plain call."""
        raise NotImplementedError

    def learn(self, tokens: Sequence[int], logits: Logits, best: Sequence[int]) -> None:
        """What the model says: ``tokens [T]`` of the nodes, ``logits [T, V]`` after each, and the ``best`` token."""

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``."""
        drafted = self.draft([*conversation.text[: conversation.length], last])
        if not drafted:
            return (conversation.step_plain(last),)
        tokens = [last, *(drafted.get(node, 0) for node in range(1, self.tree.size))]
        for (depth, column), token in zip(self._places, tokens[1:], strict=True):
            conversation.drafts[depth, column] = token
        if not self.learns:
            return conversation.step(last)
        logits = conversation.verify(last)
        best = logits.argmax(axis=1).tolist()
        path = accepted(self.tree, tokens, best)
        chosen = [best[node] for node in path]
        conversation.keep(path, chosen)
        self.learn(tokens, logits, best)
        return chosen


def accepted(tree: Tree, tokens: Sequence[int], best: Sequence[int]) -> Sequence[int]:
    """The path to the deepest node whose tokens are the ``best`` ones of their parents, as the step's graph has it."""
    right = {0}
    for node, parent in enumerate(tree.parents[1:], 1):
        if parent in right and tokens[node] == best[parent]:
            right.add(node)
    end = min(right, key=lambda node: (-tree.depths[node], node))
    return tree.path_table[end][: tree.depths[end] + 1]


def first_match(text: Sequence[int], longest: int) -> int | None:
    """Where the first occurrence of the longest end of ``text`` that occurred before ends; None if none did."""
    ends, at, last = [], 0, len(text) - 1
    while (at := text.index(text[-1], at) + 1) <= last:
        ends.append(at)
    for length in range(longest, 0, -1):
        for end in ends:
            if length <= end and text[end - length : end] == text[-length:]:
                return end
    return None


class PromptLookup(Drafter):
    """Prompt lookup decoding (Saxena; transformers' ``prompt_lookup_num_tokens``): 3 to 1 tokens that occurred before,
    the first occurrence, and the ``tokens`` that followed it."""

    def __init__(self, tokens: int) -> None:
        super().__init__(Tree.chain(tokens))

    def draft(self, text: list[int]) -> Mapping[int, int]:
        at = first_match(text, 3)
        return {} if at is None else dict(enumerate(text[at : at + self.tree.depth], 1))


class Datastore:
    """The suffix array of answers, each followed by -1, which no token is. Ends of up to 16 tokens are found."""

    longest = 16

    def __init__(self, answers: Iterable[Sequence[int]]) -> None:
        self._tokens = [token for answer in answers for token in (*answer, -1)]
        rank = np.array(self._tokens, int) + 1
        for step in (1, 2, 4, 8):  # order by 2, 4, .. tokens
            behind = np.pad(rank[step:], (0, min(step, len(rank))))[: len(rank)]
            rank = np.unique(rank * (int(rank.max(initial=0)) + 1) + behind, return_inverse=True)[1]
        self._order = np.argsort(rank, kind="stable").tolist()

    def after(self, end: list[int], depth: int, most: int) -> list[list[int]]:
        """The up to ``depth`` tokens after occurrences of ``end``, each until its answer's end.

        Of more than ``most`` occurrences it takes every second, third, ..
        """
        key = lambda at: self._tokens[at : at + len(end)]  # noqa: E731
        low = bisect_left(self._order, end, key=key)
        high = bisect_right(self._order, end, lo=low, key=key)
        found = []
        for at in self._order[low : high : 1 + (high - low) // most]:
            follows = self._tokens[at + len(end) : at + len(end) + depth]
            found.append(follows[: follows.index(-1)] if -1 in follows else follows)
        return found


class Rest(Drafter):
    """REST (2311.08252): the continuations of the longest end, 16 to 2 tokens, in other answers, as a trie.

    The paper's trie of the most frequent prefixes has another form in each step. Here it fills a static tree: a node's
    most frequent continuation goes to the child with the largest subtree, and so on; what finds no node is left out.
    """

    shortest, occurrences = 2, 256

    def __init__(self, store: Datastore, tree: Tree) -> None:
        super().__init__(tree)
        self._store = store
        self._children = children(self.tree)

    def draft(self, text: list[int]) -> Mapping[int, int]:
        found: list[list[int]] = []
        for length in range(min(self._store.longest, len(text)), self.shortest - 1, -1):
            if any(found := self._store.after(text[-length:], self.tree.depth, self.occurrences)):
                break
        drafted: dict[int, int] = {}
        self._fill(0, found, 0, drafted)
        return drafted

    def _fill(self, node: int, found: list[list[int]], depth: int, drafted: dict[int, int]) -> None:
        counts = Counter(each[depth] for each in found if len(each) > depth)
        for child, (token, _) in zip(self._children[node], counts.most_common(), strict=False):
            drafted[child] = token
            self._fill(
                child,
                [each for each in found if each[depth : depth + 1] == [token]],
                depth + 1,
                drafted,
            )


def children(tree: Tree) -> list[list[int]]:
    """The children of each node, in the order of their ranks: in trees of ``shapes`` that of their subtrees' sizes."""
    found: list[list[int]] = [[] for _ in tree.paths]
    for node, parent in enumerate(tree.parents[1:], 1):
        found[parent].append(node)
    return found


class Recycling(Drafter):
    """Token recycling (2408.08696): the 8 likeliest tokens after each token, as they were where it was verified last.

    The paper fills the matrix while it reads the prompt as well; our prefill shows no logits, so here it is filled by
    steps only. It lasts from answer to answer, as there.
    """

    learns = True

    def __init__(self, tree: Tree, k: int = 8) -> None:
        super().__init__(tree)
        self._k = k
        self._after: dict[int, list[int]] = {}
        self._children = children(self.tree)

    def draft(self, text: list[int]) -> Mapping[int, int]:
        drafted = {0: text[-1]}
        for node, below in enumerate(
            self._children
        ):  # breadth first: a parent comes before its children
            if node in drafted:
                drafted.update(zip(below, self._after.get(drafted[node], ()), strict=False))
        del drafted[0]
        return drafted or {1: 0}  # the rows of a step are also what fills the matrix

    def learn(self, tokens: Sequence[int], logits: Logits, best: Sequence[int]) -> None:
        for token, ids in zip(tokens, top(logits, self._k), strict=True):
            self._after[token] = ids


def top(logits: Logits, k: int) -> list[list[int]]:
    """The ``k`` likeliest ids of each row, likeliest first. They are in the k columns with the highest maximum."""
    rows, vocab = logits.shape
    folds, k = 64, min(k, vocab)
    columns = -(-vocab // folds)
    if vocab % folds:
        logits = np.pad(logits, ((0, 0), (0, -vocab % folds)), constant_values=-np.inf)
    best = logits.reshape(rows, folds, columns).max(axis=1)
    likely = np.argpartition(-best, min(k, columns) - 1, axis=1)[:, :k]
    ids = (likely[:, :, None] + columns * np.arange(folds)).reshape(rows, -1)
    order = np.argsort(-np.take_along_axis(logits, ids, 1), axis=1, kind="stable")[:, :k]
    found: list[list[int]] = np.take_along_axis(ids, order, 1).tolist()
    return found


class Lookahead(Drafter):
    """Lookahead decoding (2402.02057): n-grams from a window of Jacobi iterations, verified beside it.

    ``window`` W, ``n`` N, ``guesses`` G. The window begins with tokens of the prompt; the pool with its n-grams.
    """

    learns = True

    def __init__(self, window: int, n: int, guesses: int) -> None:
        self.window, self.n, self.guesses = window, n, guesses
        raw, levels, chained = shapes.lookahead(window, n, guesses)
        super().__init__(raw)
        self._cells = [[raw.paths.index(path) for path in level] for level in levels]
        self._guessed = [[raw.paths.index(path) for path in chain] for chain in chained]

    def begin(self, prompt: Sequence[int]) -> None:
        random = Random(len(prompt))
        self._levels = [
            [random.choice(prompt) for _ in range(self.window)] for _ in range(self.n - 1)
        ]
        self._pool: dict[int, dict[NGram, None]] = defaultdict(dict)
        for at in range(len(prompt) - self.n + 1):
            self._add(prompt[at : at + self.n])

    def _add(self, tokens: Sequence[int]) -> None:
        """Keep the n-gram; of those with the same first token the last ``guesses`` stay."""
        pool, rest = self._pool[tokens[0]], tuple(tokens[1:])
        pool.pop(rest, None)
        pool[rest] = None
        if len(pool) > self.guesses:
            del pool[next(iter(pool))]

    def draft(self, text: list[int]) -> Mapping[int, int]:
        self._levels[0][0] = text[-1]
        cells = zip(self._cells, self._levels, strict=True)
        drafted = {
            node: token
            for nodes, tokens in cells
            for node, token in zip(nodes, tokens, strict=True)
            if node
        }
        for nodes, tokens in zip(self._guessed, self._pool[text[-1]], strict=False):
            drafted.update(zip(nodes, tokens, strict=True))
        return drafted

    def learn(self, tokens: Sequence[int], logits: Logits, best: Sequence[int]) -> None:
        new = [best[node] for node in self._cells[-1]]
        for column in range(self.window):
            self._add([*(level[column] for level in self._levels), new[column]])
        # Each newer level stands one place further to the right: the next root is at column 0 of the second.
        self._levels = [*self._levels[1:], new]


class Merged(Drafter):
    """SpecInfer's merge (2305.09781): the drafts of several drafters in one tree, here a chain of each.

    Chains that begin alike count as one path, for the deepest node counts, whichever chain it is in.
    """

    learns = True

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        depth = drafters[0].tree.depth
        super().__init__(shapes.chains(len(drafters), depth))
        self._drafters = drafters

    def begin(self, prompt: Sequence[int]) -> None:
        for each in self._drafters:
            each.begin(prompt)

    def draft(self, text: list[int]) -> Mapping[int, int]:
        count = len(self._drafters)
        return {
            1 + count * (node - 1) + index: token
            for index, each in enumerate(self._drafters)
            for node, token in each.draft(text).items()
        }

    def learn(self, tokens: Sequence[int], logits: Logits, best: Sequence[int]) -> None:
        for each in self._drafters:
            each.learn(tokens, logits, best)
