"""The oracle itself: a correct target passes, and each way of being wrong is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ssdevice.tree import Tree
from tests.conformance.oracle import (
    Drafts,
    StepOutput,
    check,
    drive,
    force_drafts,
    force_everywhere,
)

VOCAB = 31
TREE = Tree.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 1)])


class TableDriver:
    """A target whose model is arithmetic: a cache row is a token, the next token a sum over the
    visible rows.
    """

    def __init__(
        self, tree: Tree = TREE, context: int = 30, chunk: int = 4, window: int = 5
    ) -> None:
        self.tree = tree
        self.gamma = max(tree.depth, 1)
        self.k = tree.width
        self.vocab = VOCAB
        self.context = context
        self.chunk = chunk
        self.windows = [window]
        self.cache = [VOCAB - 1] * (context + max(chunk, tree.emitted))

    def predict(self, seen: Sequence[int]) -> int:
        """The token after ``seen``, from as many of them as the window shows."""
        recent = list(seen)[-self.windows[0] :]
        return (
            sum((3 + 2 * i) * (token + 1) for i, token in enumerate(reversed(recent))) + len(seen)
        ) % VOCAB

    def draft(self, seen: Sequence[int]) -> Drafts:
        """Some function of what is committed and visible."""
        at = self.predict(seen)
        drafts = []
        for stream in range(self.gamma):
            drafts.append([(at + 7 * stream + 3 * rank) % VOCAB for rank in range(self.k)])
        return drafts

    def write(self, tokens: Sequence[int], length: int) -> None:
        assert length + len(tokens) <= len(self.cache)
        self.cache[length : length + len(tokens)] = tokens

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        self.write([*tokens, *[0] * (self.chunk - len(tokens))], length)
        seen = self.cache[: length + len(tokens)]
        return self.predict(seen), self.draft(seen)

    def plain(self, root: int, length: int) -> int:
        self.write([root], length)
        return self.predict(self.cache[: length + 1])

    def end_node(self, tokens: Sequence[int], predicted: Sequence[int]) -> int:
        """The deepest node whose whole path agrees, the lowest index among equals."""
        tree = self.tree
        accepted = [True]
        for node in range(1, tree.size):
            parent = tree.parents[node]
            accepted.append(accepted[parent] and tokens[node] == predicted[parent])
        return max(
            range(tree.size), key=lambda node: (accepted[node] * (tree.depths[node] + 1), -node)
        )

    def seen_by(self, node: int, tokens: Sequence[int], length: int) -> list[int]:
        """The tokens that a node sees: the committed ones, its ancestors and itself."""
        return self.cache[:length] + [
            tokens[j] for j in range(self.tree.size) if self.tree.ancestors[node][j]
        ]

    def commit(self, path: Sequence[int], tokens: Sequence[int], length: int) -> None:
        self.write([tokens[node] for node in path], length)

    def step(self, root: int, drafts: Drafts, length: int) -> StepOutput:
        tree = self.tree
        flat = [root, *[token for row in drafts for token in row]]
        tokens = [flat[slot] for slot in tree.draft_indices(self.k)]
        predicted = [self.predict(self.seen_by(node, tokens, length)) for node in range(tree.size)]
        end = self.end_node(tokens, predicted)
        path = tree.path_table[end]
        next_drafts = self.draft(self.seen_by(end, tokens, length))
        self.commit(path, tokens, length)
        return StepOutput([predicted[node] for node in path], tree.depths[end] + 1, next_drafts)

    def rows(self, start: int, end: int) -> np.ndarray[Any, Any] | None:
        return np.array(self.cache[start:end])


PROMPT = [4, 9, 2, 17, 30, 11, 5]


TREES = {
    "root only": Tree.root_only(),
    "chain of 1": Tree.chain(1),
    "chain of 4": Tree.chain(4),
    "full, 2 deep": Tree.full(2, 2),
    "4 wide": Tree.full(4, 1),
    "uneven": TREE,
}


@pytest.mark.parametrize("name", TREES)
def test_a_correct_target_passes(name: str) -> None:
    tree = TREES[name]
    driver = TableDriver(tree)
    facts = drive(driver, PROMPT)
    check(facts, driver, row_tolerance=0.0, perturbation_tolerance=0.0)
    assert facts.steps >= tree.size


def test_targets_without_readable_rows_pass_too() -> None:
    class Opaque(TableDriver):
        def rows(self, start: int, end: int) -> None:
            return None

    driver = Opaque()
    facts = drive(driver, PROMPT)
    check(facts, driver, row_tolerance=0.0)
    assert facts.rows_compared == 0


class SeesRejectedRows(TableDriver):
    def seen_by(self, node: int, tokens: Sequence[int], length: int) -> list[int]:
        return self.cache[:length] + list(tokens[: node + 1])


class SeesGarbage(TableDriver):
    def plain(self, root: int, length: int) -> int:
        self.write([root], length)
        return self.predict(self.cache[: length + 2])


class ForgetsThePath(TableDriver):
    def end_node(self, tokens: Sequence[int], predicted: Sequence[int]) -> int:
        agree = [
            node == 0 or tokens[node] == predicted[self.tree.parents[node]]
            for node in range(self.tree.size)
        ]
        return max(
            range(self.tree.size),
            key=lambda node: (agree[node] * (self.tree.depths[node] + 1), -node),
        )


class NeverAccepts(TableDriver):
    def end_node(self, tokens: Sequence[int], predicted: Sequence[int]) -> int:
        return 0


class AcceptsTooMuch(TableDriver):
    def end_node(self, tokens: Sequence[int], predicted: Sequence[int]) -> int:
        return self.tree.size - 1


class CommitsTheFirstRows(TableDriver):
    def commit(self, path: Sequence[int], tokens: Sequence[int], length: int) -> None:
        self.write(list(tokens[: len(path)]), length)


class ClampsItsWrites(TableDriver):
    """As dynamic-update-slice does where the capacity leaves no room for A rows at a nearly full
    context.
    """

    def commit(self, path: Sequence[int], tokens: Sequence[int], length: int) -> None:
        super().commit(path, tokens, min(length, self.context - self.tree.emitted))


class BakesTheOffset(TableDriver):
    def commit(self, path: Sequence[int], tokens: Sequence[int], length: int) -> None:
        super().commit(path, tokens, len(PROMPT))


class DraftsFromRejectedRows(TableDriver):
    def step(self, root: int, drafts: Drafts, length: int) -> StepOutput:
        out = super().step(root, drafts, length)
        shifted = []
        for row in out.drafts:
            shifted.append([(token + drafts[0][0]) % VOCAB for token in row])
        return StepOutput(out.tokens, out.count, shifted)


class CountsOneLess(TableDriver):
    def step(self, root: int, drafts: Drafts, length: int) -> StepOutput:
        out = super().step(root, drafts, length)
        return StepOutput(out.tokens, max(1, out.count - 1), out.drafts)


class LosesItsFirstChunk(TableDriver):
    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        root, drafts = super().prefill(tokens, length)
        self.cache[0] = len(set(self.cache)) % VOCAB
        return root, drafts


@pytest.mark.parametrize(
    "wrong",
    [
        SeesRejectedRows,
        SeesGarbage,
        ForgetsThePath,
        NeverAccepts,
        AcceptsTooMuch,
        CommitsTheFirstRows,
        ClampsItsWrites,
        BakesTheOffset,
        DraftsFromRejectedRows,
        CountsOneLess,
        LosesItsFirstChunk,
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_target_is_noticed(wrong: Callable[[], TableDriver], seed: int) -> None:
    driver = wrong()
    with pytest.raises(AssertionError):
        check(drive(driver, PROMPT, seed), driver, row_tolerance=0.0)


@pytest.mark.parametrize("node", range(TREE.size))
def test_forced_drafts_are_true_only_on_the_path(node: int) -> None:
    continuation = [3, 8, 5]
    drafts = force_drafts(TREE, 2, 3, continuation, node, VOCAB, random.Random(node))
    for depth, row in enumerate(drafts):
        right = [rank for rank, token in enumerate(row) if token == continuation[depth]]
        assert right == ([TREE.paths[node][depth]] if depth < TREE.depths[node] else [])
        assert all(0 <= token < VOCAB for token in row)


def test_planting_needs_a_long_enough_continuation() -> None:
    with pytest.raises(ValueError, match="node 6 is 3 deep, the continuation has 2 tokens"):
        force_drafts(TREE, 2, 3, [1, 2], 6, VOCAB, random.Random(0))
    assert force_everywhere(2, 2, [5], VOCAB, random.Random(0))[0] == [5, 5]


def test_a_context_too_short_for_every_count_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold the prompt and a step of every count"):
        drive(TableDriver(context=11), PROMPT)
