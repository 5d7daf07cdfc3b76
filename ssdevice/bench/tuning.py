"""The fastest draft tree and schedule for a device: the acceptance of every tree is computed from one decoding, and the
cost of every size that may be chosen is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from ssdevice.bench.cost_table import CostTable, StepCost
from ssdevice.bench.equality import answer, forcer
from ssdevice.bench.machine import cpu_name, instructions
from ssdevice.bundle.manifest import Manifest
from ssdevice.config import Schedule
from ssdevice.contract import PLAIN
from ssdevice.errors import InputError
from ssdevice.progress import Report, track
from ssdevice.ranks import MISS, count_paths, tokens_per_step
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine, EngineOptions
from ssdevice.runtime.loop import plain, plain_step, prefill
from ssdevice.tree import Tree

TIMED_STEPS = 40
TIMED_PROMPT = 32
TIMED_PREFILLS = 10
DIGITS = 4  # of milliseconds


@dataclass(frozen=True)
class Choice:
    """A tree, the cost of its step in the cheaper schedule, and the tokens that a step emits by the observed drafts."""

    tree: Tree
    cost: StepCost
    tokens_per_step: float

    @property
    def tokens_per_second(self) -> float:
        """Predicted decoding speed, without prefill."""
        return self.tokens_per_step / self.cost.ms * 1e3


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


def measure_costs(bundles: Sequence[tuple[Engine, Manifest]], options: EngineOptions, report: Report) -> CostTable:
    """Median times of each engine's step, and of plain steps and prefill; for equal sizes and schedules, the least.

    The table describes this device and the first bundle.
    """
    steps: dict[tuple[int, Schedule], float] = {}
    plain_ms: list[float] = []
    prefill_ms: list[float] = []
    engine, first = bundles[0]
    for each, manifest in track(report, "time steps", bundles):
        conversation = each.new_conversation()
        key = each.geometry.tree.size, manifest.schedule
        steps[key] = min(steps.get(key, float("inf")), _time(conversation, conversation.step))
        if PLAIN in each.functions:
            plain_ms.append(_time(conversation, conversation.step_plain))
        if each.geometry.chunk == engine.geometry.chunk:
            prefill_ms.append(_time_prefill(conversation))
    return CostTable(
        device=cpu_name(),
        instructions=tuple(instructions()),
        target=first.target,
        precision=first.precision.value,
        threads=options.threads,
        kernels=engine.kernels,
        model=first.model.sha256,
        gamma=first.geometry.gamma,
        msa_layers=first.msa_layers,
        steps=tuple(StepCost(nodes, schedule, ms) for (nodes, schedule), ms in sorted(steps.items())),
        plain_ms=min(plain_ms, default=None),
        prefill_tokens=min(engine.geometry.chunk, engine.geometry.context),
        prefill_ms=min(prefill_ms),
    )


def _time(conversation: Conversation, call: Callable[[int], object]) -> float:
    conversation.length = 0
    geometry = conversation.geometry
    size = min(TIMED_PROMPT, geometry.context // 2)
    root = prefill(conversation, [i % geometry.vocab for i in range(size)])
    return _median_ms(lambda: call(root), TIMED_STEPS)


def _time_prefill(conversation: Conversation) -> float:
    geometry = conversation.geometry
    chunk = [i % geometry.vocab for i in range(min(geometry.chunk, geometry.context))]

    def call() -> None:
        conversation.length = 0
        prefill(conversation, chunk)

    return _median_ms(call, TIMED_PREFILLS)


def _median_ms(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        clock = perf_counter()
        call()
        times.append((perf_counter() - clock) * 1e3)
    return round(median(times), DIGITS)


def choices(ranks: Sequence[Sequence[Sequence[int]]], costs: Sequence[StepCost]) -> list[Choice]:
    """The best tree of each measured size in the cheaper schedule, fastest first.

    Only measured sizes are chosen: kernels work on tiles of rows, so a step of one row more may cost much more. Sizes
    that no observed draft fills are absent. Raises InputError if none remains.
    """
    paths = count_paths(ranks)
    cheapest: dict[int, StepCost] = {}
    for cost in sorted(costs, key=lambda cost: -cost.ms):
        cheapest[cost.nodes] = cost
    trees = {size: Tree.from_counts(paths, size) for size in cheapest}
    found = [
        Choice(tree, cheapest[size], tokens_per_step(ranks, tree)) for size, tree in trees.items() if tree.size == size
    ]
    if not found:
        most = max(tree.size for tree in trees.values())
        if most == 1:
            raise InputError("no draft was ever right: the app has not learned to draft these prompts")
        sizes = ", ".join(map(str, sorted(cheapest)))
        raise InputError(f"the drafts fill a tree of {most} nodes, and only steps of {sizes} nodes were measured")
    return sorted(found, key=lambda choice: -choice.tokens_per_second)
