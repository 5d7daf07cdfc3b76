"""Whether all decoding modes emit the same tokens, and whether a difference is a near-tie or a fault.

Three modes are compared with plain decoding: plain decoding through the step graph, speculative decoding with the
bundle's own drafts, and with *forced* drafts. A bundle with an untrained or badly matched app accepts few of its own
drafts, so forced drafts put the plain answer on one tree path after another, with wrong ids everywhere else. Every
node then becomes the end of an accepted run.

Sums over differently placed rows are not bit-equal, so two candidates with nearly tied logits may swap. A difference
counts as a near-tie if, at the first differing token, the two best logits are at most twice as far apart as the largest
change of any logit between the modes on rows where they agree, and that change is below the ceiling of the precision.
Anything else is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ssdevice.bundle.manifest import Precision
from ssdevice.contract import PLAIN, STEP
from ssdevice.errors import BundleError
from ssdevice.progress import Report, track
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine
from ssdevice.runtime.loop import Advance, decode, plain, plain_step, prefill, speculative
from ssdevice.text.stream import Emission

FORCED = "forced"
MARGIN_PROMPTS = 2
"""Prompts whose logits are compared even if all modes agree, so that the largest change is always known."""
CEILINGS = {
    Precision.FP32: 1e-3,
    Precision.FP16: 0.1,
    Precision.INT8: 0.5,
    Precision.INT4: 0.5,
    Precision.PALETTE4: 0.5,
}
"""Largest allowed change of a logit between modes, by precision, fixed before any run."""
DIFFERING_SHARE = 0.005


class ShowsLogits(Protocol):
    """A conversation that keeps ``logits [emitted, vocab]`` of its last step."""

    logits: NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """Where a mode first differs from plain decoding.

    ``margin``: distance of the two best logits in plain decoding; None if not measured.
    """

    mode: str
    prompt: int
    position: int
    expected: int
    found: int
    margin: float | None = None


@dataclass
class Comparison:
    """Answers compared with plain ones, and the rule that excuses near-ties.

    ``precision``: of the bundle, or the coarser one of two. ``largest_change``: of any logit on agreeing rows; None if
    logits were not available. ``between``: what is compared.
    """

    precision: Precision
    prompts: int
    differences: list[Difference] = field(default_factory=list)
    largest_change: float | None = None
    between: str = "modes"

    @property
    def ceiling(self) -> float:
        """The largest allowed ``largest_change``."""
        return CEILINGS[self.precision]

    def near_tie(self, difference: Difference) -> bool:
        """Whether the margin of a difference excuses it."""
        change, margin = self.largest_change, difference.margin
        return change is not None and margin is not None and change <= self.ceiling and margin <= 2 * change

    def as_json(self) -> dict[str, Any]:
        """The comparison as ``verify --json`` writes it."""
        return {
            "prompts": self.prompts,
            "largest_logit_change": self.largest_change,
            "ceiling": self.ceiling,
            "differences": [
                {
                    "arm": d.mode,
                    "prompt": d.prompt,
                    "position": d.position,
                    "expected": d.expected,
                    "found": d.found,
                    "margin": d.margin,
                    "near_tie": self.near_tie(d),
                }
                for d in self.differences
            ],
        }

    def near_ties(self) -> list[str]:
        """The differences that are excused, one line each."""
        return [
            f"near-tie: {d.mode}, prompt {d.prompt + 1}, token {d.position + 1}: {d.expected} and {d.found} "
            f"are {d.margin:.3g} apart"
            for d in self.differences
            if self.near_tie(d)
        ]

    def faults(self) -> list[str]:
        """Differences that are not near-ties, and a change beyond the ceiling, one sentence each."""
        found = []
        for d in self.differences:
            if not self.near_tie(d):
                why = "its margin was not measured" if d.margin is None else f"its margin is {d.margin:.3g}"
                found.append(
                    f"{d.mode}: prompt {d.prompt + 1} differs at token {d.position + 1} "
                    f"({d.found} instead of {d.expected}); not a near-tie: {why}"
                )
        change = self.largest_change
        if change is not None and change > self.ceiling:
            found.append(f"a logit changes by {change:.3g} between {self.between}, at most {self.ceiling} may")
        return found


@dataclass
class Equality(Comparison):
    """The result of ``compare``.

    ``nodes_ended``: tree nodes at which an accepted run ended. ``answers``: tokens of plain decoding, by prompt.
    """

    modes: list[str] = field(default_factory=list)
    tokens: int = 0
    nodes_ended: set[int] = field(default_factory=set)
    nodes: int = 1
    answers: list[list[int]] = field(default_factory=list)

    @property
    def allowed(self) -> int:
        """How many prompts of a mode may differ: none in fp32, otherwise 0.5 % but at least one."""
        return 0 if self.precision is Precision.FP32 else max(1, int(self.prompts * DIFFERING_SHARE))

    def as_json(self) -> dict[str, Any]:
        more = {"tokens": self.tokens, "arms": self.modes, "nodes": self.nodes, "nodes_ended": len(self.nodes_ended)}
        return super().as_json() | more

    def faults(self) -> list[str]:
        """What breaks the promise of equal answers, one sentence each."""
        found = super().faults()
        for mode in self.modes:
            count = sum(d.mode == mode for d in self.differences)
            if count > self.allowed:
                found.append(f"{mode}: {count} of {self.prompts} prompts differ, at most {self.allowed} may")
        return found


def compare(
    engine: Engine,
    shown: Engine | None,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    max_tokens: int,
    precision: Precision,
    report: Report,
) -> Equality:
    """Decode prompts in all modes of an engine. ``shown``: an engine that also shows logits, if the target has one."""
    base = plain_of(engine)
    conversation = engine.new_conversation()
    modes: dict[str, Advance] = {}
    if STEP in engine.functions:
        modes = {"plain_step": plain_step} if base is plain else {}
        modes |= {"speculative": speculative, FORCED: speculative}
    result = Equality(precision, len(prompts), modes=list(modes), nodes=engine.geometry.tree.size)
    for number, ids in enumerate(track(report, "compare decoding modes", prompts)):
        expected = answer(conversation, ids, base, stop_ids, max_tokens)
        result.tokens += len(expected)
        result.answers.append(expected)
        differing = []
        for name, advance in modes.items():
            chosen = forcer(len(ids), expected, result.nodes_ended) if name == FORCED else advance
            found = answer(conversation, ids, chosen, stop_ids, max_tokens)
            if found != expected:
                differing.append((name, first_difference(expected, found)))
        margins: NDArray[np.float32] | None = None
        if modes and shown is not None and (differing or number < MARGIN_PROMPTS):
            change, margins = logit_change(shown.new_conversation(), ids, expected, base)
            result.largest_change = max(result.largest_change or 0.0, change)
        for name, (position, expect, found_token) in differing:
            # The first token comes from prefill, which all modes share; margins begin with the second.
            margin = float(margins[position - 1]) if margins is not None and 0 < position <= len(margins) else None
            result.differences.append(Difference(name, number, position, expect, found_token, margin))
    return result


def plain_of(engine: Engine) -> Advance:
    """Plain decoding with the functions that an engine has."""
    return plain if PLAIN in engine.functions else plain_step


def answer(
    conversation: Conversation, ids: Sequence[int], advance: Advance, stop_ids: Sequence[int], max_tokens: int
) -> list[int]:
    """The tokens of one answer, without text."""
    stops = frozenset(stop_ids)

    def accept(run: Sequence[int]) -> Emission:
        end = next((i + 1 for i, token in enumerate(run) if token in stops), None)
        return Emission("", end or len(run), end is not None)

    conversation.length = 0
    return [token for run in decode(conversation, ids, advance, accept, max_tokens) for token in run.tokens]


def forcer(prompt_tokens: int, truth: Sequence[int], ended: set[int]) -> Advance:
    """An ``Advance`` that forces ``truth`` onto one tree path per step, node by node, with wrong ids elsewhere.

    ``ended`` collects the nodes at which runs ended.
    """
    turn = 0

    def advance(conversation: Conversation, last: int) -> Sequence[int]:
        nonlocal turn
        tree, vocab = conversation.geometry.tree, conversation.geometry.vocab
        at = conversation.length - prompt_tokens + 1  # index in truth of what follows the last token
        node = turn % tree.size
        turn += 1
        for stream in range(conversation.geometry.gamma):
            true = truth[at + stream] if at + stream < len(truth) else 0
            conversation.drafts[stream] = (true + 1 + np.arange(conversation.geometry.k)) % vocab
            if stream < len(tree.paths[node]) and at + stream < len(truth):
                conversation.drafts[stream, tree.paths[node][stream]] = true
        run = conversation.step(last)
        if len(run) == len(tree.paths[node]) + 1:
            ended.add(node)
        return run

    return advance


def logit_change(
    conversation: Conversation, ids: Sequence[int], truth: Sequence[int], base: Advance
) -> tuple[float, NDArray[np.float32]]:
    """The largest change of a logit between plain decoding and the step, both kept on ``truth``.

    Also returns the margins between the two best logits of plain decoding, by token of ``truth`` from the second on.
    ``base``: plain decoding, from ``plain_of``.
    """
    rows = led(conversation, ids, truth, base)
    change = 0.0
    for advance in (speculative, forcer(len(ids), truth, set())):
        other = led(conversation, ids, truth, advance)
        count = min(len(rows), len(other))
        change = max(change, float(np.abs(rows[:count] - other[:count]).max(initial=0.0)))
    best = np.partition(rows, -2, axis=1)[:, -2:] if len(rows) else np.zeros((0, 2), np.float32)
    return change, best[:, 1] - best[:, 0]


def lead(conversation: Conversation, ids: Sequence[int], truth: Sequence[int], advance: Advance) -> Iterator[int]:
    """Keep a mode on ``truth`` after ``ids``, whatever it chooses: how many tokens of ``truth`` each call stood for.

    The first is 0, for the prefill. A token counts if all before it are truth: the first of a call always.
    """
    conversation.length = 0
    if ids:
        prefill(conversation, ids)
    yield (at := 0)
    while at + 1 < len(truth):
        run, kept = advance(conversation, truth[at]), 1
        while kept < len(run) and at + kept + 1 < len(truth) and run[kept - 1] == truth[at + kept]:
            kept += 1
        conversation.length += kept
        at += kept
        yield kept


def led(conversation: Conversation, ids: Sequence[int], truth: Sequence[int], advance: Advance) -> NDArray[np.float32]:
    """Logits ``[len(truth) - 1, vocab]`` of a mode that is kept on ``truth`` after ``ids``, whatever it chooses.

    Raises BundleError for logits that are not finite.
    """
    rows: list[NDArray[np.float32]] = []
    for kept in lead(conversation, ids, truth, advance):
        logits = cast(ShowsLogits, conversation).logits[:kept]
        if not np.isfinite(logits).all():
            raise BundleError(f"{conversation.engine.source}: logits are not finite; export the bundle again")
        rows.extend(logits)
    return np.stack(rows) if rows else np.zeros((0, conversation.geometry.vocab), np.float32)


def first_difference(expected: Sequence[int], found: Sequence[int]) -> tuple[int, int, int]:
    """The first position at which two answers differ and both tokens there; -1 for an answer that has ended."""
    for i, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return i, a, b
    i = min(len(expected), len(found))
    return i, expected[i] if i < len(expected) else -1, found[i] if i < len(found) else -1
