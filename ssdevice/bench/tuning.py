"""The fastest draft tree and schedule for this device: the acceptance of every tree is computed from one decoding,
its cost is interpolated between measured steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from ssdevice.bench.equality import answer, forcer
from ssdevice.config import Schedule
from ssdevice.contract import PLAIN
from ssdevice.errors import InputError
from ssdevice.progress import Report, track
from ssdevice.ranks import MISS, count_paths, tokens_per_step
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine
from ssdevice.runtime.loop import plain, plain_step, prefill
from ssdevice.tree import Tree

TIMED_STEPS = 40
TIMED_PROMPT = 32


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a step of ``size`` tree nodes; size 1 is plain decoding, whose ``schedule`` is None."""

    size: int
    milliseconds: float
    schedule: Schedule | None = None


@dataclass(frozen=True)
class Choice:
    """A tree and its expected performance. ``milliseconds`` per step are interpolated between measured sizes."""

    tree: Tree
    schedule: Schedule
    tokens_per_step: float
    milliseconds: float

    @property
    def tokens_per_second(self) -> float:
        """Expected decoding speed."""
        return self.tokens_per_step / self.milliseconds * 1e3


def observe(
    engine: Engine, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], max_tokens: int, report: Report
) -> list[list[list[int]]]:
    """For each prompt and token of its answer: the ranks of the next tokens among the candidates of streams 1, 2, ...

    Each answer is decoded twice: plainly, then with drafts that are always wrong, so that every step ends at its root
    and drafts for it.
    """
    conversation = engine.new_conversation()
    base = plain if PLAIN in engine.functions else plain_step
    return [
        _ranks(conversation, ids, answer(conversation, ids, base, stop_ids, max_tokens))
        for ids in track(report, "observe drafts", prompts)
    ]


def _ranks(conversation: Conversation, ids: Sequence[int], truth: Sequence[int]) -> list[list[int]]:
    conversation.length = 0
    prefill(conversation, ids)
    rows = []
    for at, root in enumerate(truth):
        row = []
        for stream, candidates in enumerate(conversation.drafts.tolist(), 1):
            true = truth[at + stream] if at + stream < len(truth) else -1
            row.append(candidates.index(true) if true in candidates else MISS)
        rows.append(row)
        if at + 1 < len(truth):
            # The first node of a new forcer is the root, so all drafts are wrong.
            forcer(len(ids), truth, set())(conversation, root)
            conversation.length += 1
    return rows


def measure_costs(engines: Sequence[tuple[Engine, Schedule]], report: Report) -> list[Cost]:
    """Median milliseconds of plain steps and of each engine's step; for equal sizes and schedules, the cheapest."""
    costs: dict[tuple[int, Schedule | None], float] = {}
    for engine, schedule in track(report, "time steps", engines):
        conversation = engine.new_conversation()
        calls: list[tuple[int, Schedule | None, Callable[[int], object]]] = [
            (engine.geometry.tree.size, schedule, conversation.step)
        ]
        if PLAIN in engine.functions:
            calls.append((1, None, conversation.step_plain))
        for size, kind, call in calls:
            costs[size, kind] = min(costs.get((size, kind), float("inf")), _time(conversation, call))
    if len(costs) < 2:
        raise InputError("only one size of step can be timed; give a bundle that has step_plain")
    found = [Cost(size, milliseconds, kind) for (size, kind), milliseconds in costs.items()]
    return sorted(found, key=lambda cost: (cost.schedule or "", cost.size))


def _time(conversation: Conversation, call: Callable[[int], object]) -> float:
    conversation.length = 0
    geometry = conversation.geometry
    size = min(TIMED_PROMPT, geometry.context // 2)
    root = prefill(conversation, [i % geometry.vocab for i in range(size)])
    times = []
    for _ in range(TIMED_STEPS):
        clock = perf_counter()
        call(root)
        times.append((perf_counter() - clock) * 1e3)
    return median(times)


def interpolate(costs: Sequence[Cost], size: int) -> float:
    """Milliseconds of a step of ``size`` nodes on the line through the nearest measured sizes."""
    after = next((i for i, cost in enumerate(costs) if cost.size >= size), len(costs) - 1)
    low, high = costs[max(after, 1) - 1], costs[max(after, 1)]
    share = (size - low.size) / (high.size - low.size)
    return low.milliseconds + share * (high.milliseconds - low.milliseconds)


def choices(ranks: Sequence[Sequence[Sequence[int]]], sizes: Sequence[int], costs: Sequence[Cost]) -> list[Choice]:
    """The best tree of each size in the cheaper schedule, fastest first. Sizes that no observed draft fills are absent.

    A schedule counts if its steps were measured at two sizes, one of which may be plain decoding.
    """
    paths = count_paths(ranks)
    trees = {tree.size: tree for tree in (Tree.from_counts(paths, size) for size in sizes) if tree.size > 1}
    if not trees:
        raise InputError("no draft was ever right: the app has not learned to draft these prompts")
    plain_costs = [cost for cost in costs if cost.schedule is None]
    lines: dict[Schedule, list[Cost]] = {}
    for schedule in Schedule:
        own = [cost for cost in costs if cost.schedule is schedule]
        if own and len(plain_costs) + len(own) > 1:
            lines[schedule] = [*plain_costs, *own]
    found = []
    for size, tree in trees.items():
        schedule = min(lines, key=lambda s: interpolate(lines[s], size))
        found.append(Choice(tree, schedule, tokens_per_step(ranks, tree), interpolate(lines[schedule], size)))
    return sorted(found, key=lambda choice: -choice.tokens_per_second)
