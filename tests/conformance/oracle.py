"""Oracle drafts: a conformance run in which every way a step can end does occur, for any target.

A random model accepts almost no draft, so its own drafts would test little. Here the plain
continuation is put on a chosen tree path and everything around it is wrong, so that the chosen node
must be the end node. ``drive`` decodes to a full context that way, over every node in turn, and
returns what occurred and what differed as facts; ``check`` asserts them. Nothing here knows a
framework: a target needs a ``Driver`` of integers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ssdevice.tree import Tree

Drafts = list[list[int]]
"""γ rows of k candidate ids."""


@dataclass(frozen=True)
class StepOutput:
    """What a target's step gave: A ``tokens``, ``count`` of them valid, and next ``drafts``."""

    tokens: list[int]
    count: int
    drafts: Drafts


class Driver(Protocol):
    """One conversation on a target: calls of the step contract; the cache stays inside.

    Every call at ``length`` writes its rows at cache positions ``length`` and on, whatever stood
    there before: a driver never clears anything, so garbage beyond the length is part of the test.
    ``context``: tokens the export holds. ``windows``: sizes of the sliding windows that occur
    (empty: none).
    """

    tree: Tree
    gamma: int
    k: int
    vocab: int
    context: int
    chunk: int
    windows: Sequence[int]

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """Commit 1 to ``chunk`` tokens at ``length``: (the next token, drafts)."""
        ...

    def step(self, last: int, drafts: Drafts, length: int) -> StepOutput:
        """One speculative step; at least ``count`` rows are committed at ``length``."""
        ...

    def plain(self, last: int, length: int) -> int:
        """One plain step; one row is committed at ``length``."""
        ...

    def rows(self, start: int, end: int) -> np.ndarray[Any, Any] | None:
        """Cache rows ``start .. end - 1`` of all layers in one array, a copy; None where they
        cannot be read.
        """
        ...


@dataclass
class Facts:
    """What happened in a drive.

    ``differences``: sentences about integers that were not as they must be.

    ``row_error``: largest |difference| of a committed row from plain decoding's, whose largest
    |value| is ``row_size``. ``perturbation_error``: the same between a step and its repetition with
    other rejected drafts (``perturbations`` of them). ``false_branches``: steps in which a rejected
    token was followed by its own true continuation.
    """

    prompt: list[int]
    plain: list[int] = field(default_factory=list)
    end_nodes: set[int] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)
    steps: int = 0
    repeated: int = 0
    perturbations: int = 0
    false_branches: int = 0
    final_length: int = 0
    last_write: int = 0
    differences: list[str] = field(default_factory=list)
    row_error: float = 0.0
    row_size: float = 0.0
    rows_compared: int = 0
    perturbation_error: float = 0.0
    drafts: list[Drafts] = field(default_factory=list)


def force_drafts(
    tree: Tree,
    k: int,
    gamma: int,
    continuation: Sequence[int],
    end_node: int,
    vocab: int,
    rng: random.Random,
) -> Drafts:
    """Drafts ``[γ, k]`` whose accepted end is exactly ``end_node``.

    ``continuation``: the true tokens after the root. The node's path carries them; every other
    candidate of a stream is some other id. Streams beyond the continuation get random ids, so it
    must reach past the node for the end to be exact, unless the node is a leaf of the deepest
    stream.
    """
    path = tree.paths[end_node]
    if len(path) > len(continuation):
        raise ValueError(
            f"node {end_node} is {len(path)} deep, the continuation has {len(continuation)} tokens"
        )
    drafts = []
    for j in range(gamma):
        true = continuation[j] if j < len(continuation) else None
        row = [_other(true, vocab, rng) for _ in range(k)]
        if j < len(path):
            row[path[j]] = continuation[j]
        drafts.append(row)
    return drafts


def force_everywhere(
    k: int, gamma: int, continuation: Sequence[int], vocab: int, rng: random.Random
) -> Drafts:
    """Drafts in which every candidate is right: many nodes tie, and the lowest of the deepest must
    win.
    """
    drafts = []
    for j in range(gamma):
        if j < len(continuation):
            drafts.append([continuation[j]] * k)
        else:
            drafts.append([rng.randrange(vocab) for _ in range(k)])
    return drafts


def _other(token: int | None, vocab: int, rng: random.Random) -> int:
    if token is None:
        return rng.randrange(vocab)
    return (token + rng.randrange(1, vocab)) % vocab


def prefill_all(driver: Driver, prompt: Sequence[int]) -> tuple[int, Drafts]:
    """Prefill a prompt chunk by chunk from an empty cache; the last chunk's root and drafts."""
    if not prompt:
        raise ValueError("a prompt has at least one token")
    for at in range(0, len(prompt), driver.chunk):
        last = driver.prefill(prompt[at : at + driver.chunk], at)
    return last


def drive(driver: Driver, prompt: Sequence[int], seed: int = 0, perturb: bool = True) -> Facts:
    """Plain decoding to a full context, then oracle-drafted decoding over it until every node was
    an end node.

    Each speculative round starts with a prefill over the used cache and runs to the full context.
    Stops after as many rounds as the tree has nodes. ``perturb``: repeat each step with other
    rejected drafts.
    """
    rng = random.Random(seed)
    facts = Facts(list(prompt))
    start = len(prompt)
    tree = driver.tree
    if driver.context - start < tree.emitted + 1:
        raise ValueError("the context must hold the prompt and a step of every count")

    root, first_drafts = prefill_all(driver, prompt)
    truth = facts.plain
    truth.append(root)
    for length in range(start, driver.context):
        truth.append(driver.plain(truth[-1], length))
    plain_rows = driver.rows(0, driver.context)

    _false_branches(driver, facts, rng)
    # Deepest first: the order mixes counts, and a short last round still has room for the shallow
    # ones.
    todo = sorted(range(tree.size), key=lambda node: -tree.depths[node])
    for _ in range(tree.size):
        _round(driver, facts, first_drafts, todo, rng, perturb)
        if plain_rows is not None:
            rows = driver.rows(0, driver.context)
            assert rows is not None
            facts.row_error = max(facts.row_error, _distance(rows, plain_rows))
            facts.row_size = max(facts.row_size, float(np.abs(plain_rows).max(initial=0.0)))
            facts.rows_compared += driver.context
        if not todo:
            break
    return facts


def _round(
    driver: Driver,
    facts: Facts,
    first_drafts: Drafts,
    todo: list[int],
    rng: random.Random,
    perturb: bool,
) -> None:
    """One prefill and one speculative run to the full context; nodes that became end nodes leave
    ``todo``.
    """
    start = len(facts.prompt)
    tree = driver.tree
    truth = facts.plain
    root, drafts = prefill_all(driver, facts.prompt)
    if root != truth[0]:
        facts.differences.append(f"prefill's root is {root}, the first time it was {truth[0]}")
    if drafts != first_drafts:
        facts.differences.append(
            f"prefill's drafts are {drafts}, the first time they were {first_drafts}"
        )
    length = start
    steps = 0
    while length < driver.context:
        ahead = truth[length - start + 1 :]
        room = driver.context - length
        if steps == 0:
            # the model's own drafts: whatever is accepted must still be true
            node = None
            given = drafts
        elif steps == 1:
            node = None
            given = force_everywhere(driver.k, driver.gamma, ahead, driver.vocab, rng)
            facts.repeated += 1
        else:
            node = _next_node(tree, todo, room, rng)
            given = force_drafts(tree, driver.k, driver.gamma, ahead, node, driver.vocab, rng)
        out = driver.step(truth[length - start], given, length)
        steps += 1
        facts.steps += 1
        facts.drafts.append(out.drafts)
        facts.last_write = length + tree.emitted
        kept = _check_step(driver, facts, out, ahead, node, length)
        if steps == 2 and out.count < min(tree.emitted, room):
            facts.differences.append(
                f"at length {length} all drafts were right, count is {out.count}"
            )
        if node is not None and out.count == tree.depths[node] + 1:
            facts.end_nodes.add(node)
            facts.counts.add(out.count)
            if node in todo:
                todo.remove(node)
            if perturb:
                _perturb(driver, facts, truth[length - start], ahead, node, out, length, rng)
        length += kept
    facts.final_length = length


def _false_branches(driver: Driver, facts: Facts, rng: random.Random) -> None:
    """Steps with a path that is true, then wrong, then right about the wrong token: it must end
    where it went wrong.

    Such a node agrees with its parent's prediction, so a verification that forgets the rest of the
    path takes it.
    """
    tree = driver.tree
    start = len(facts.prompt)
    truth = facts.plain
    for node in range(tree.size):
        path = tree.paths[node]
        if len(path) < 2 or start + len(path) >= driver.context:
            continue
        right = rng.randrange(len(path) - 1)
        ahead = list(truth[1:])
        branch = [*ahead[:right], _other(ahead[right], driver.vocab, rng)]
        token = truth[0]
        for depth in range(len(path)):  # commits the branch's rows, as far as they are known
            predicted = driver.plain(token, start + depth)
            if depth >= len(branch):
                branch.append(predicted)
            token = branch[depth]
        drafts = force_drafts(tree, driver.k, driver.gamma, ahead, 0, driver.vocab, rng)
        for depth, rank in enumerate(path):
            drafts[depth][rank] = branch[depth]
        out = driver.step(truth[0], drafts, start)
        facts.false_branches += 1
        if out.count != right + 1 or out.tokens[: right + 1] != ahead[: right + 1]:
            facts.differences.append(
                f"a branch that is wrong from token {right} on gave {out.tokens[: out.count]}, "
                f"expected {ahead[: right + 1]}"
            )


def _next_node(tree: Tree, todo: Sequence[int], room: int, rng: random.Random) -> int:
    """A node whose end is exact in ``room`` tokens, first one still to do; the last step has room
    for one token.
    """
    if room == 1:
        return max(node for node in range(tree.size) if tree.depths[node] <= 1)
    fitting = [node for node in range(tree.size) if tree.depths[node] + 1 < room]
    waiting = [node for node in todo if node in fitting]
    return waiting[0] if waiting else rng.choice(fitting)


def _check_step(
    driver: Driver,
    facts: Facts,
    out: StepOutput,
    ahead: Sequence[int],
    node: int | None,
    length: int,
) -> int:
    """Record what is wrong with a step; the number of tokens to advance by (those that were true,
    at least one).
    """
    tree = driver.tree
    where = f"at length {length}, forced node {node}"
    if len(out.tokens) != tree.emitted or not 1 <= out.count <= tree.emitted:
        facts.differences.append(
            f"{where}: {len(out.tokens)} tokens, count {out.count}; A is {tree.emitted}"
        )
        return 1
    shape = [len(row) for row in out.drafts]
    if shape != [driver.k] * driver.gamma or not all(
        0 <= t < driver.vocab for row in out.drafts for t in row
    ):
        facts.differences.append(f"{where}: drafts {out.drafts} are not [γ, k] ids")
    kept = min(out.count, len(ahead))
    if out.tokens[:kept] != list(ahead[:kept]):
        facts.differences.append(
            f"{where}: tokens {out.tokens[:kept]}, plain decoding gives {list(ahead[:kept])}"
        )
    # The end is exact only where the continuation reaches past the node.
    if node is not None and tree.depths[node] < len(ahead) and out.count != tree.depths[node] + 1:
        facts.differences.append(f"{where}: count {out.count}, expected {tree.depths[node] + 1}")
    true = 0
    while true < kept and out.tokens[true] == ahead[true]:
        true += 1
    return max(1, true)


def _perturb(
    driver: Driver,
    facts: Facts,
    root: int,
    ahead: Sequence[int],
    node: int,
    before: StepOutput,
    length: int,
    rng: random.Random,
) -> None:
    """Repeat a step with other wrong siblings: nothing that leaves it may change."""
    rows = driver.rows(length, length + before.count)
    # Where the known answer ends, the step itself says what would be right; no sibling may hit it
    # by luck.
    true = [*ahead, *before.tokens[len(ahead) : before.count]]
    again = driver.step(
        root,
        force_drafts(driver.tree, driver.k, driver.gamma, true, node, driver.vocab, rng),
        length,
    )
    facts.perturbations += 1
    if (again.tokens[: again.count], again.count) != (before.tokens[: before.count], before.count):
        facts.differences.append(
            f"at length {length}, end node {node}: other rejected drafts changed the tokens"
        )
    if again.drafts != before.drafts:
        facts.differences.append(
            f"at length {length}, end node {node}: other rejected drafts changed the next drafts"
        )
    after = driver.rows(length, length + before.count)
    if rows is not None and after is not None:
        facts.perturbation_error = max(facts.perturbation_error, _distance(rows, after))


def _distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))


def check(
    facts: Facts, driver: Driver, row_tolerance: float, perturbation_tolerance: float = 1e-6
) -> None:
    """Assert that a drive was not vacuous and that speculative decoding was plain decoding.

    ``row_tolerance``: for committed rows against plain decoding's, which sum the same keys in
    another order.
    """
    tree = driver.tree
    assert facts.differences == []
    # Not vacuous: every end, every count, a full cache, past every window, and a text that says
    # something.
    assert facts.end_nodes == set(range(tree.size))
    assert facts.counts == set(range(1, tree.emitted + 1))
    assert facts.final_length == driver.context
    assert facts.last_write == driver.context - 1 + tree.emitted
    assert all(driver.context - len(facts.prompt) > window for window in driver.windows)
    assert len(facts.plain) == driver.context - len(facts.prompt) + 1
    assert len(set(facts.plain)) >= 3
    assert facts.repeated > 0
    assert facts.false_branches == sum(depth >= 2 for depth in tree.depths)
    if facts.rows_compared:
        assert facts.row_error <= row_tolerance
    if facts.perturbations:
        assert facts.perturbation_error <= perturbation_tolerance
