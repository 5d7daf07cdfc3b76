"""The parity gate: what was exported, driven beside the torch reference through every way a step can end.

A random or real model accepts few drafts of its own, so drafts are planted: the reference's plain continuation stands
on one tree path at a time and wrong ids stand everywhere else. Both sides get the same integers at every call. Integers
must agree; where they do not, the reference's logits of the two candidates must be closer than ``Tolerance.tie``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch

from ssdevice.contract import COUNT, NEXT_DRAFTS, NEXT_ROOT, PLAIN, PREFILL, ROWS, STEP, TOKENS, Geometry
from ssdevice.errors import ParityError
from ssdevice.export.forms import function_module
from ssdevice.export.plan import ExportJob
from ssdevice.model.reference import Cache, int32
from ssdevice.model.step import PrefillModule, StepModule
from ssdevice.tree import Tree

Array = np.ndarray[Any, Any]
Drafts = list[list[int]]
FIRST_PROMPT_ID = 3
MAX_STEPS = 24


@dataclass(frozen=True)
class Tolerance:
    """``rows``: root mean square difference of the committed rows of one layer's keys or values, relative to theirs.

    Where a quantized input lies on a rounding edge, the two sides may round apart: one element then moves by a whole
    level, and what depends on it follows. Such calls are few, so ``typical`` can bound the median over all calls.

    ``tie``: two candidates whose reference logits are this close may change places.
    """

    rows: float
    tie: float
    typical: float = 1.0


@dataclass(frozen=True)
class StepOut:
    """``tokens``: those that count. ``drafts``: γ rows of k ids."""

    tokens: list[int]
    drafts: Drafts


class Driver(Protocol):
    """One conversation with an exported artifact; it commits what a call gives at ``length``."""

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """Commit 1 to C tokens: (the next token, drafts)."""
        ...

    def step(self, last: int, drafts: Drafts, length: int) -> StepOut:
        """One speculative step after the token ``last``; its accepted rows are committed."""
        ...

    def plain(self, last: int, length: int) -> int:
        """One plain step; one row is committed."""
        ...

    def rows(self, start: int, end: int) -> Array | None:
        """Committed rows ``[2 * layers, end - start, kv_heads * head_dim]``; None where they cannot be read."""
        ...


class TorchDriver:
    """The reference as a Driver. ``main``/``streams``: logits of the last call, ``[rows, V]`` each."""

    def __init__(self, job: ExportJob) -> None:
        plan, model = job.plan, job.loaded.model
        self.geometry = g = plan.geometry
        self.modules = {name: function_module(name, model, g, plan.schedule) for name in plan.function_names}
        self.model = model
        size = max(g.chunk, g.tree.emitted) + g.context
        self.cache = Cache(torch.zeros(g.layers, 2, 1, g.kv_heads, size, g.head_dim))
        self.main: Array = np.zeros((0, g.vocab), np.float32)
        self.streams: Array = np.zeros((0, g.vocab), np.float32)

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """See Driver."""
        module, chunk = self.modules[PREFILL], self.geometry.chunk
        assert isinstance(module, PrefillModule)
        ids = torch.tensor([*tokens, *([0] * (chunk - len(tokens)))], dtype=torch.int32)
        out = self._watched(lambda: module(ids, int32(len(tokens)), int32(length), self._past(length)))
        self.cache.commit(out.rows, len(tokens))
        return int(out.token), out.drafts.tolist()

    def step(self, last: int, drafts: Drafts, length: int) -> StepOut:
        """See Driver."""
        module = self.modules[STEP]
        assert isinstance(module, StepModule)
        given = torch.tensor(drafts, dtype=torch.int32)
        out = self._watched(lambda: module(int32(last), given, int32(length), self._past(length)))
        count = int(out.count)
        self.cache.commit(out.rows, count)
        return StepOut(out.tokens[:count].tolist(), out.drafts.tolist())

    def plain(self, last: int, length: int) -> int:
        """See Driver."""
        module = self.modules[PLAIN]
        assert isinstance(module, StepModule)
        none = torch.zeros(0, 1, dtype=torch.int32)
        out = self._watched(lambda: module(int32(last), none, int32(length), self._past(length)))
        self.cache.commit(out.rows, 1)
        return int(out.tokens)

    def rows(self, start: int, end: int) -> Array:
        """See Driver."""
        rows = self.cache.rows[:, :, 0, :, start:end].transpose(2, 3)
        return rows.reshape(2 * self.geometry.layers, end - start, -1).numpy().copy()

    def _past(self, length: int) -> list[Any]:
        self.cache.length = length
        return self.cache.past()

    def _watched(self, call: Callable[[], Any]) -> Any:
        seen: list[Array] = []

        def keep(_: object, __: object, logits: torch.Tensor) -> None:
            seen.append(logits.detach().reshape(-1, logits.shape[-1]).float().numpy())

        def spread(_: object, __: object, logits: torch.Tensor) -> None:
            """Drafts are compared by token id, so a draft vocabulary's logits go to their ids."""
            assert self.model.streams is not None
            everywhere = np.full((logits[0].shape[0], self.geometry.vocab), -np.inf, np.float32)
            everywhere[:, self.model.streams.draft_ids.numpy()] = logits[0].detach().float().numpy()
            seen.append(everywhere)

        hooks = [self.model.backbone.lm_head.register_forward_hook(keep)]
        if self.model.draft_head is not None:
            hooks.append(self.model.draft_head.register_forward_hook(spread))
        try:
            with torch.no_grad():
                out = call()
        finally:
            for hook in hooks:
                hook.remove()
        self.main = seen[0]
        self.streams = seen[1] if len(seen) > 1 else self.streams
        return out


@dataclass
class Gate:
    """A comparison in progress: what was seen, as facts for the manifest."""

    reference: TorchDriver
    artifact: Driver
    tolerance: Tolerance
    geometry: Geometry
    report: Callable[[int, int, str], None]
    row_errors: list[float] = field(default_factory=list)
    worst_tie: float = 0.0
    ties: int = 0
    steps: int = 0
    counts: set[int] = field(default_factory=set)

    def facts(self) -> dict[str, float]:
        """The largest differences, and how much was compared."""
        return {
            "rows": max(self.row_errors, default=0.0),
            "rows_median": median(self.row_errors) if self.row_errors else 0.0,
            "near_ties": float(self.ties),
            "near_tie_margin": self.worst_tie,
            "steps": float(self.steps),
            "counts": float(len(self.counts)),
        }

    def same_rows(self, where: str, start: int, end: int) -> None:
        """Committed rows agree within the tolerance; raises ParityError."""
        mine = self.artifact.rows(start, end)
        if mine is None:
            return
        theirs = self.reference.rows(start, end)
        if mine.shape != theirs.shape or not np.isfinite(mine).all():
            raise ParityError(f"{where}: {ROWS} has shape {mine.shape} or values that are not finite")
        size = np.maximum(np.sqrt(np.square(theirs).mean(axis=(1, 2))), 1e-6)
        far = np.sqrt(np.square(mine.astype(np.float32) - theirs).mean(axis=(1, 2))) / size
        layer = int(far.argmax())
        self.row_errors.append(float(far[layer]))
        if far[layer] > self.tolerance.rows:
            part = "values" if layer % 2 else "keys"
            raise ParityError(
                f"{where}: {ROWS}, {part} of layer {layer // 2} differ by {far[layer]:.3g} of their size, "
                f"allowed is {self.tolerance.rows:g}"
            )

    def typical_rows(self) -> None:
        """The median difference of rows is within the tolerance; raises ParityError."""
        typical = self.facts()["rows_median"]
        if typical > self.tolerance.typical:
            raise ParityError(
                f"{ROWS} differ by {typical:.3g} of their size in half of the calls, "
                f"allowed is {self.tolerance.typical:g}"
            )

    def same_id(self, where: str, name: str, mine: int, theirs: int, logits: Array) -> bool:
        """Whether two ids agree; False for a near-tie, ParityError for anything worse."""
        if mine == theirs:
            return True
        if not 0 <= mine < len(logits):
            raise ParityError(f"{where}: {name} is {mine}, not a token")
        margin = float(logits[theirs] - logits[mine])
        self.worst_tie = max(self.worst_tie, abs(margin))
        if abs(margin) > self.tolerance.tie:
            raise ParityError(
                f"{where}: {name} is {mine}, the reference says {theirs} with a margin of {margin:.3g}; "
                f"a near-tie is at most {self.tolerance.tie:g}"
            )
        self.ties += 1
        return False

    def reference_ties(self, where: str, node: int, tokens: list[int], plain: list[int]) -> bool:
        """Whether the reference's own step left plain decoding at a near-tie; ParityError for anything worse."""
        for place, (mine, theirs) in enumerate(zip(tokens, plain, strict=False)):
            if mine != theirs:
                at = self.geometry.tree.path_table[node][place]
                return not self.same_id(
                    f"{where}, the reference", f"{TOKENS}[{place}]", mine, theirs, self.reference.main[at]
                )
        return False

    def same_drafts(self, where: str, mine: Drafts, theirs: Drafts) -> None:
        """Every candidate agrees or is a near-tie."""
        for j, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            for rank, (a, b) in enumerate(zip(one, other, strict=True)):
                self.same_id(where, f"{NEXT_DRAFTS}[{j},{rank}]", a, b, self.reference.streams[j])


def check(job: ExportJob, artifact: Driver, tolerance: Tolerance) -> dict[str, float]:
    """Prefill in chunks, plain steps, then a step for every depth and more; raises ParityError naming tensor and step.

    Returns the largest differences for the manifest.
    """
    g = job.plan.geometry
    gate = Gate(TorchDriver(job), artifact, tolerance, g, lambda i, n, d: job.report("check parity", i, n, d))
    nodes = _end_nodes(g.tree) if g.gamma else []
    plain_steps = 3
    room = g.context - g.tree.emitted - 1
    prompt = _prompt(g, min(g.chunk + g.chunk // 2 + 1, max(1, room // 2)))
    length = _compare_prefill(gate, prompt)
    while len(nodes) > 1 and sum(g.tree.depths[n] + 1 for n in nodes) + plain_steps + length > room:
        nodes.pop()
    if length + plain_steps <= room:
        _compare_plain(gate, prompt, plain_steps)
    if nodes:
        _compare_steps(gate, prompt, nodes)
    gate.typical_rows()
    return gate.facts()


def _prompt(g: Geometry, length: int) -> list[int]:
    draw = np.random.default_rng(0)
    return [int(i) for i in draw.integers(min(FIRST_PROMPT_ID, g.vocab - 1), g.vocab, length)]


def _end_nodes(tree: Tree) -> list[int]:
    """Nodes to end at: one of every depth first, deepest last of these, then the others, MAX_STEPS at most."""
    first = [tree.depths.index(depth) for depth in range(tree.depth + 1)]
    return (first + [node for node in range(tree.size) if node not in first])[:MAX_STEPS]


def _prefill(driver: Driver, tokens: Sequence[int], chunk: int) -> tuple[int, Drafts]:
    result: tuple[int, Drafts] = (0, [])
    for at in range(0, len(tokens), chunk):
        result = driver.prefill(tokens[at : at + chunk], at)
    return result


def _compare_prefill(gate: Gate, prompt: list[int]) -> int:
    theirs = _prefill(gate.reference, prompt, gate.geometry.chunk)
    mine = _prefill(gate.artifact, prompt, gate.geometry.chunk)
    gate.same_rows(PREFILL, 0, len(prompt))
    gate.same_id(PREFILL, NEXT_ROOT, mine[0], theirs[0], gate.reference.main[-1])
    if gate.geometry.gamma:
        gate.same_drafts(PREFILL, mine[1], theirs[1])
    return len(prompt)


def _compare_plain(gate: Gate, prompt: list[int], steps: int) -> None:
    root, _ = _prefill(gate.reference, prompt, gate.geometry.chunk)
    for i in range(steps):
        where, length = f"{PLAIN}, step {i + 1}", len(prompt) + i
        theirs, mine = gate.reference.plain(root, length), gate.artifact.plain(root, length)
        gate.same_rows(where, length, length + 1)
        gate.same_id(where, f"{TOKENS}[0]", mine, theirs, gate.reference.main[0])
        root = theirs


def _compare_steps(gate: Gate, prompt: list[int], nodes: Sequence[int]) -> None:
    g, reference = gate.geometry, gate.reference
    wanted = sum(g.tree.depths[node] + 1 for node in nodes) + g.gamma + 1
    root, _ = _prefill(reference, prompt, g.chunk)
    truth = [root]
    while len(truth) <= wanted and len(prompt) + len(truth) < g.context:
        truth.append(reference.plain(truth[-1], len(prompt) + len(truth) - 1))
    draw = np.random.default_rng(1)
    _prefill(gate.artifact, prompt, g.chunk)
    done = 0
    for i, node in enumerate(nodes):
        gate.report(i, len(nodes), f"step {i + 1}")
        depth = g.tree.depths[node]
        length, root = len(prompt) + done, truth[done]
        if done + 1 + depth >= len(truth):
            break
        drafts = plant(g, node, truth[done + 1 :], draw)
        theirs, mine = reference.step(root, drafts, length), gate.artifact.step(root, drafts, length)
        where = f"{STEP} {i + 1} (end node {node})"
        if gate.reference_ties(where, node, theirs.tokens, truth[done + 1 : done + 2 + depth]):
            continue  # the next step writes over these rows
        at = _compare_tokens(gate, where, mine.tokens, theirs.tokens, node)
        if at is None:
            gate.same_rows(where, length, length + len(theirs.tokens))
            gate.same_drafts(where, mine.drafts, theirs.drafts)
        else:  # a near-tie: what follows on the two sides is not comparable, so both begin again behind it
            _prefill(gate.artifact, prompt + truth[: done + 1 + depth], g.chunk)
        gate.steps += 1
        gate.counts.add(len(theirs.tokens))
        done += depth + 1


def _compare_tokens(gate: Gate, where: str, mine: list[int], theirs: list[int], node: int) -> int | None:
    """Where the tokens part (a near-tie), or None; raises ParityError."""
    path = gate.geometry.tree.path_table[node]
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if not gate.same_id(where, f"{TOKENS}[{i}]", a, b, gate.reference.main[path[i]]):
            return i
    if len(mine) != len(theirs):
        raise ParityError(f"{where}: {COUNT} is {len(mine)}, the reference accepts {len(theirs)}")
    return None


def plant(g: Geometry, node: int, continuation: Sequence[int], draw: np.random.Generator) -> Drafts:
    """Drafts ``[γ, k]`` with the continuation on the path to ``node`` and other ids everywhere else."""
    path = g.tree.paths[node]
    drafts = []
    for j in range(g.gamma):
        true = continuation[j] if j < len(continuation) else -1
        row = [int(i) for i in draw.integers(0, g.vocab, g.k)]
        row = [(i + 1) % g.vocab if i == true else i for i in row]
        if j < len(path):
            row[path[j]] = true
        drafts.append(row)
    return drafts
