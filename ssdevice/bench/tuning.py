"""The fastest draft tree and schedule for a device.

The acceptance of every tree is computed from one decoding; the cost of every size that may be
chosen is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Self

from ssdevice.bench.machine import cpu_name, instructions
from ssdevice.bench.modes import answer, forcer, lead, plain_of
from ssdevice.bench.runner import BenchOptions, Measured, take_turns, timed_answer
from ssdevice.bundle.staging import write_json
from ssdevice.config import Schedule, load_strict, read_json, to_json
from ssdevice.contract import PLAIN
from ssdevice.errors import ConfigError, InputError
from ssdevice.progress import Report, track
from ssdevice.rules import ABOVE_0, Ruled, within
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine, EngineOptions
from ssdevice.runtime.loop import SPECULATIVE
from ssdevice.runtime.session import Session
from ssdevice.tree import MAX_NODES, MISS, Tree, count_paths, tokens_per_step

DIGITS = 4
"""Decimals of milliseconds in a cost table."""


@dataclass(frozen=True)
class StepCost(Ruled):
    """Mean milliseconds of a step of ``nodes`` tree nodes, streams included, in a schedule."""

    nodes: int = field(metadata=within(2, MAX_NODES))
    schedule: Schedule
    ms: float = field(metadata=ABOVE_0)


@dataclass(frozen=True)
class CostTable(Ruled):
    """Costs on one device with one setting.

    - ``model``: sha256 of the base's weights. ``gamma``, ``msa_layers``: of the app.
    - ``threads``: 0 for the engine's default.
    - ``plain_ms``: a plain step, None if the bundles have none.

    Raises ConfigError for a size that appears twice in a schedule.
    """

    device: str
    instructions: tuple[str, ...]
    target: str
    precision: str
    threads: int
    kernels: bool
    model: str
    gamma: int
    msa_layers: int
    steps: tuple[StepCost, ...]
    plain_ms: float | None = field(metadata=ABOVE_0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.steps:
            raise ConfigError("steps: none, so there is no tree to choose")
        sizes = {(step.nodes, step.schedule) for step in self.steps}
        if len(sizes) < len(self.steps):
            raise ConfigError("steps: a size appears twice in one schedule")

    @classmethod
    def read(cls, file: Path) -> Self:
        """The table in a file. Raises ConfigError, which names the file and the field."""
        return load_strict(cls, read_json(file), str(file))

    def write(self, file: Path) -> None:
        """Write the table to a file, for ``read``."""
        write_json(file, to_json(self))

    def check(self, where: str, model: str, gamma: int, msa_layers: int) -> None:
        """Raise InputError if the table is of another model, or of other streams."""
        check_same(
            where,
            "the bundle",
            ("base model", self.model, model),
            ("γ", self.gamma, gamma),
            ("number of MSA layers", self.msa_layers, msa_layers),
        )


def check_same(what: str, reference: str, *facts: tuple[str, object, object]) -> None:
    """Raise InputError for the first of ``facts`` in which ``what`` differs from ``reference``.

    A fact is a name and its two values.
    """
    for name, found, expected in facts:
        if found != expected:
            raise InputError(f"{what}: its {name} is {found}, that of {reference} is {expected}")


@dataclass(frozen=True)
class Choice:
    """A tree, the cost of its step in the cheaper schedule, and the tokens that a step emits.

    ``tokens_per_step``: by the observed drafts.
    """

    tree: Tree
    cost: StepCost
    tokens_per_step: float

    @property
    def tokens_per_second(self) -> float:
        """Predicted decoding speed, without prefill."""
        return self.tokens_per_step / self.cost.ms * 1e3


def observe(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    max_tokens: int,
    report: Report,
) -> list[list[list[int]]]:
    """The ranks of next tokens among the candidates of streams 1, 2, ..

    They go by prompt, by token of its answer, and by stream. Each answer is decoded plainly, then
    with drafts that are always wrong, so that every step ends at its root and drafts for it.
    """
    conversation = engine.new_conversation()
    base = plain_of(engine)
    found = list[list[list[int]]]()
    for ids in track(report, "observe drafts", prompts):
        truth = answer(conversation, ids, base, stop_ids, max_tokens)
        found.append(_ranks(conversation, ids, truth))
    return found


def _ranks(conversation: Conversation, ids: Sequence[int], truth: Sequence[int]) -> list[list[int]]:
    """The ranks of one answer, by token and stream."""

    def wrong(conversation: Conversation, last: int) -> Sequence[int]:
        # A new forcer begins with the root, for which all drafts are wrong.
        force = forcer(len(ids), truth, set())
        return force(conversation, last)

    rows = list[list[int]]()
    for at, _ in enumerate(lead(conversation, ids, truth, wrong), 1):
        next_tokens = chain(truth[at:], repeat(-1))
        ranks = list[int]()
        for candidates, true in zip(conversation.drafts.tolist(), next_tokens, strict=False):
            ranks.append(candidates.index(true) if true in candidates else MISS)
        rows.append(ranks)
    return rows


def measure_costs(
    sessions: Sequence[Session],
    prompts: Sequence[Sequence[int]],
    most: int,
    options: EngineOptions,
    report: Report,
) -> CostTable:
    """The mean time of each bundle's step while it answers prompts, and that of a plain step.

    Times are counted as ``bench`` does. ``most``: tokens of an answer. The bundles take turns,
    prompt by prompt, so that a drift of the machine affects all alike; the least counts for equal
    sizes and schedules. The table describes this device and the first bundle.

    Raises InputError if no answer has a second token.
    """
    session = sessions[0]
    first = session.bundle.manifest
    counted = BenchOptions(max_tokens=most)
    lanes = [(each, Measured(SPECULATIVE)) for each in sessions]
    with_plain = [each for each in sessions if PLAIN in each.engine.functions]
    if with_plain:
        lanes.append((with_plain[0], Measured("plain")))
    for each, measured in lanes:
        timed_answer(each, prompts[0], measured.name, counted)  # the first call opens a graph

    def report_steps(_: str, done: int, total: int, __: str) -> None:
        report("time steps", done, total, "")

    for number, at, lane in take_turns(1, len(prompts), len(lanes), report_steps):
        each, measured = lanes[lane]
        measured.add(number, timed_answer(each, prompts[at], measured.name, counted))
    costs = [round(measured.ms_per_step.median, DIGITS) for _, measured in lanes]
    if not all(costs):
        raise InputError("no answer has a second token, so there is no step to time")
    steps: dict[tuple[int, Schedule], float] = {}
    for each, cost in zip(sessions, costs, strict=False):
        key = each.engine.geometry.tree.size, each.bundle.manifest.schedule
        steps[key] = min(steps.get(key, float("inf")), cost)
    return CostTable(
        device=cpu_name(),
        instructions=tuple(instructions()),
        target=first.target,
        precision=first.precision.value,
        threads=options.threads,
        kernels=session.engine.kernels is not None,
        model=first.model.sha256,
        gamma=first.geometry.gamma,
        msa_layers=first.msa_layers,
        steps=tuple(
            StepCost(nodes, schedule, ms) for (nodes, schedule), ms in sorted(steps.items())
        ),
        plain_ms=costs[-1] if len(lanes) > len(sessions) else None,
    )


def choices(ranks: Sequence[Sequence[Sequence[int]]], costs: Sequence[StepCost]) -> list[Choice]:
    """The best tree of each measured size in the cheaper schedule, fastest first.

    Kernels work on tiles of rows, so a step of one row more may cost much more: only measured sizes
    are chosen, and of these only what observed drafts fill. Raises InputError if none remains.
    """
    paths = count_paths(ranks)
    # Of several costs of a size the last one stays: the least.
    cheapest = {cost.nodes: cost for cost in sorted(costs, key=lambda cost: -cost.ms)}
    trees = {size: Tree.from_counts(paths, size) for size in cheapest}
    filled = [tree for size, tree in trees.items() if tree.size == size]
    if not filled:
        most = max(tree.size for tree in trees.values())
        if most == 1:
            raise InputError(
                "no draft was ever right: the app has not learned to draft these prompts"
            )
        sizes = ", ".join(map(str, sorted(cheapest)))
        raise InputError(
            f"the drafts fill a tree of {most} nodes, and only steps of {sizes} nodes were measured"
        )
    found = [Choice(tree, cheapest[tree.size], tokens_per_step(ranks, tree)) for tree in filled]
    return sorted(found, key=lambda choice: -choice.tokens_per_second)
