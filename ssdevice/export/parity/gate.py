"""The parity gate: compares what was exported with the torch reference before anything is
published.

Two checks must pass (docs/parity.md):

``follow``
    Every product with the artifact's own rows, if the target can show them. Errors do not
    accumulate, so bounds are
    tight. Targets that cannot have followed their traced programs before they lowered them
    (``traced``).
``compare``
    The artifact as it ships, through every way a step can end. A random or real model accepts few
    of its own drafts,
    so drafts are forced: the reference's plain continuation is put on one tree path at a time, with
    wrong ids
    everywhere else. Errors do accumulate here, so they are compared with the differences that the
    reference itself
    shows when its numbers change by a rounding (``Spread``).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from ssdevice.contract import (
    COUNT,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROWS,
    STEP,
    TOKENS,
    Geometry,
)
from ssdevice.errors import ParityError
from ssdevice.export.exporter import ExportJob, jobs
from ssdevice.export.parity.difference import Array, as_stored
from ssdevice.export.parity.follow import follow
from ssdevice.export.parity.products import Bounds, Shown
from ssdevice.export.parity.reference import (
    Drafts,
    Driver,
    TorchDriver,
    force_drafts,
    random_prompt,
    run_prefill,
)
from ssdevice.export.parity.spread import DRAWS, Spread
from ssdevice.export.plan import AppPlan
from ssdevice.model.mapped import released_after
from ssdevice.progress import Report

FLOAT_JITTER = 1e-6
"""Ten times the difference between float32 sums in different orders."""
QUANTIZED_JITTER = 1e-5
"""Larger, so that the twin meets every kind of rounding edge that an artifact may meet."""
HALF_JITTER = 1e-3
"""Two roundings to float16."""
MAX_STEPS = 24
RETRIES = 8
"""Places of a conversation for steps that a near-tie kept from their end node."""
PLAIN_STEPS = 3


Result = TypeVar("Result")


@dataclass
class Gate:
    """A comparison in progress.

    ``twin``: the reference with jitter, which shows how far right results may differ.

    ``artifact``: the reference itself in a further draw, which is for the twin.
    """

    reference: TorchDriver
    twin: TorchDriver
    artifact: Driver
    geometry: Geometry
    report: Report
    spread: Spread = field(default_factory=Spread)
    steps: int = 0
    counts: set[int] = field(default_factory=set)

    def facts(self) -> dict[str, float]:
        return {
            **self.spread.facts(),
            "steps": float(self.steps),
            "counts": float(len(self.counts)),
        }

    def commit(self, tokens: Sequence[int], length: int) -> None:
        """Commit these tokens at ``length`` on all sides, whatever each side accepted there."""
        for driver in dict.fromkeys((self.twin, self.reference, self.artifact)):
            for i, token in enumerate(tokens):
                driver.plain(token, length + i)  # a chunk would cost many times as much

    def sides(self, call: Callable[[Driver], Result]) -> tuple[Result, Result, Result]:
        """What a call gives on the twin, the reference and the artifact; logits of main rows are
        recorded.
        """
        twins = call(self.twin)
        theirs = call(self.reference)
        self.spread.logits(self.twin.main, self.reference.main)
        return twins, theirs, theirs if self.artifact is self.reference else call(self.artifact)

    def same_rows(self, where: str, start: int, end: int) -> None:
        """Record committed rows. Raises ParityError for rows that cannot be compared."""
        if (mine := self.artifact.rows(start, end)) is None:
            return
        theirs = self.reference.rows(start, end)
        if mine.shape != theirs.shape or not np.isfinite(mine).all():
            raise ParityError(
                f"{where}: {ROWS} has shape {mine.shape} or values that are not finite"
            )
        self.spread.rows(
            *(as_stored(rows, mine.dtype) for rows in (mine, self.twin.rows(start, end), theirs))
        )

    def same_id(self, where: str, name: str, mine: int, theirs: int, logits: Array) -> bool:
        """Whether two ids agree.

        If not, ``Spread.fault`` tells later whether that was a near-tie.
        """
        if mine == theirs:
            return True
        if not 0 <= mine < len(logits):
            raise ParityError(f"{where}: {name} is {mine}, not a token")
        self.spread.tie(where, name, mine, theirs, float(abs(logits[theirs] - logits[mine])))
        return False

    def same_drafts(self, where: str, mine: Drafts, theirs: Drafts) -> None:
        for j, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            for rank, (a, b) in enumerate(zip(one, other, strict=True)):
                self.same_id(where, f"{NEXT_DRAFTS}[{j},{rank}]", a, b, self.reference.streams[j])

    def same_tokens(self, where: str, mine: list[int], theirs: list[int], node: int) -> bool:
        """Whether all tokens agree; False for a near-tie."""
        path = self.geometry.tree.path_table[node]
        for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if not self.same_id(where, f"{TOKENS}[{i}]", a, b, self.reference.main[path[i]]):
                return False
        if len(mine) != len(theirs):
            raise ParityError(
                f"{where}: {COUNT} is {len(mine)}, the reference accepts {len(theirs)}"
            )
        return True


def check(
    job: ExportJob,
    artifact: Driver,
    jitter: float,
    shown: Shown | None = None,
    bounds: Bounds | None = None,
) -> dict[str, float]:
    """Follow the products, if the artifact shows them, then compare results.

    Returns facts for the manifest.

    ``jitter``: relative jitter of the reference's twin, such as ``FLOAT_JITTER``. Raises
    ParityError, which says what is wrong and where.
    """
    backbone = job.loaded.model.backbone
    with released_after((*backbone.layers, backbone.lm_head)):
        if shown is None or bounds is None:
            return compare(job, artifact, jitter)
        return follow(job, shown, bounds) | compare(
            job, artifact, jitter, steps=job.plan.geometry.tree.emitted + 2
        )


def check_each(
    job: ExportJob, check_app: Callable[[AppPlan, ExportJob], Mapping[str, float]]
) -> dict[str, float]:
    """The check of every app, each with a reference of its own; unless they are merged, facts and
    refusals name it.
    """
    facts: dict[str, float] = {}
    for app, one in jobs(job):
        try:
            found = check_app(app, one)
        except ParityError as error:
            raise error if job.plan.merged else ParityError(f"app {app.name!r}: {error}") from error
        facts |= (
            found
            if job.plan.merged
            else {f"{app.name}.{name}": value for name, value in found.items()}
        )
    return facts


def compare(
    job: ExportJob, artifact: Driver, jitter: float, steps: int = MAX_STEPS
) -> dict[str, float]:
    """Prefill in chunks, plain steps, then a step for every depth and ``steps`` in all; see
    ``check``.
    """
    seed = 1
    gate = _run(job, artifact, jitter, steps, seed)
    while (fault := gate.spread.fault(jitter)) is not None:
        if seed == DRAWS:
            raise ParityError(fault)
        seed += 1
        gate.spread.widen(_run(job, None, jitter, steps, seed).spread)
    return gate.facts()


def _run(job: ExportJob, artifact: Driver | None, jitter: float, steps: int, seed: int) -> Gate:
    """The calls of ``compare``; ``seed``: of the twin's changes; without an artifact only the twin
    is measured.
    """
    g = job.plan.geometry
    reference = TorchDriver(job)
    gate = Gate(reference, TorchDriver(job, jitter, seed), artifact or reference, g, job.report)
    # The steps' end nodes: one of every depth, in order of depth, then the others.
    first = [g.tree.depths.index(depth) for depth in range(g.tree.depth + 1)]
    nodes = (
        [*first, *(node for node in range(g.tree.size) if node not in first)][:steps]
        if g.gamma
        else []
    )
    room = g.context - g.tree.emitted - 1
    prompt = random_prompt(g, min(g.chunk + g.chunk // 2 + 1, max(1, room // 2)))
    root = _compare_prefill(gate, prompt)
    while (
        len(nodes) > 1
        and sum(g.tree.depths[n] + 1 for n in nodes) + PLAIN_STEPS + len(prompt) > room
    ):
        nodes.pop()
    if len(prompt) + PLAIN_STEPS <= room:
        _compare_plain(gate, prompt, root)
    if nodes:
        _compare_steps(gate, prompt, root, nodes)
    if nodes and g.short:
        _compare_steps(replace(gate, geometry=g.shorter), prompt, root, range(g.short + 1))
    return gate


def _compare_prefill(gate: Gate, prompt: list[int]) -> int:
    _, theirs, mine = gate.sides(lambda driver: run_prefill(driver, prompt, gate.geometry.chunk))
    gate.same_rows(PREFILL, 0, len(prompt))
    gate.spread.logits(gate.twin.streams, gate.reference.streams)
    gate.same_id(PREFILL, NEXT_ROOT, mine[0], theirs[0], gate.reference.main[-1])
    if gate.geometry.gamma:
        gate.same_drafts(PREFILL, mine[1], theirs[1])
    return theirs[0]


def _compare_plain(gate: Gate, prompt: list[int], root: int) -> None:
    for i in range(PLAIN_STEPS):
        where = f"{PLAIN}, step {i + 1}"
        length = len(prompt) + i
        _, theirs, mine = gate.sides(lambda driver: driver.plain(root, length))  # noqa: B023  called at once
        gate.same_rows(where, length, length + 1)
        gate.same_id(where, f"{TOKENS}[0]", mine, theirs, gate.reference.main[0])
        root = theirs


def _compare_steps(gate: Gate, prompt: list[int], root: int, nodes: Sequence[int]) -> None:
    """A step to every node, one behind the other.

    Where a near-tie keeps the reference or the artifact from a node, it is tried again later, one
    token further on: otherwise nobody would have seen a step of that depth.
    """
    g = gate.geometry
    reference = gate.reference
    wanted = sum(g.tree.depths[node] + 1 for node in nodes) + g.gamma + 1 + RETRIES
    truth = [root]
    while len(truth) <= wanted and len(prompt) + len(truth) < g.context:
        truth.append(reference.plain(truth[-1], len(prompt) + len(truth) - 1))
    draw = np.random.default_rng(1)
    waiting = deque(nodes)
    done = 0
    while waiting and done + 1 + g.tree.depths[waiting[0]] < len(truth):
        gate.report(
            "check parity", 2 * len(nodes) - len(waiting), 2 * len(nodes), f"step {gate.steps + 1}"
        )
        node = waiting.popleft()
        emitted = g.tree.depths[node] + 1
        length = len(prompt) + done
        root = truth[done]
        drafts = force_drafts(g, node, truth[done + 1 :], draw)
        twin, theirs, mine = gate.sides(lambda driver: driver.step(root, drafts, length))  # noqa: B023  called at once
        where = f"{STEP} {gate.steps + 1} (end node {node})"
        reached = gate.same_tokens(
            f"{where}, the reference", theirs.tokens, truth[done + 1 : done + 1 + emitted], node
        )
        if not reached or not gate.same_tokens(where, mine.tokens, theirs.tokens, node):
            waiting.append(node)
            gate.commit([root], length)
            done += 1
            continue
        if twin.tokens == theirs.tokens:
            gate.same_rows(where, length, length + emitted)
            gate.spread.logits(gate.twin.streams, reference.streams)
        else:  # a near-tie of the twin: all sides go on behind it
            gate.commit(truth[done : done + emitted], length)
        gate.same_drafts(where, mine.drafts, theirs.drafts)
        gate.steps += 1
        gate.counts.add(emitted)
        done += emitted
