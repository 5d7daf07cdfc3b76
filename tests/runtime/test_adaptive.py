"""Speculation pauses where it does not pay, comes back where it does, and changes no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest

from ssdevice.runtime.adaptive import BUDGET, LONGEST_PAUSE, Adaptive
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import speculative

PLAIN_SECONDS = 1.0


class Machine:
    """A conversation whose calls take the time they are said to take; a step emits ``accepted`` drafts and a token."""

    def __init__(self, step_seconds: float, accepted: float, seed: int = 0) -> None:
        self.step_seconds, self.accepted = step_seconds, accepted
        self.now = 0.0
        self.opening = 0.0  # seconds that the first plain call takes longer
        self.slowness = 1.0  # of everything, while others use the machine
        self.calls: list[str] = []
        self.drafts = np.arange(4, dtype=np.int32)[:, None]
        self._draw = np.random.default_rng(seed)
        self.forced: Callable[[], Sequence[int]] = tuple

    def clock(self) -> float:
        return self.now

    def step(self, last: int) -> list[int]:
        self.calls.append("step")
        self.now += self.step_seconds * self.slowness
        return [0] * (1 + min(4, int(self._draw.poisson(self.accepted))))

    def step_plain(self, last: int) -> int:
        self.calls.append("plain")
        self.now += PLAIN_SECONDS * self.slowness + self.opening
        self.opening = 0.0
        return 0

    def decode(self, adaptive: Adaptive, tokens: int) -> float:
        """Tokens per plain call's time."""
        start, count = self.now, 0
        while count < tokens:
            count += len(adaptive(cast(Conversation, self), 0))
        return count / (self.now - start)


def adaptive_on(machine: Machine) -> Adaptive:
    return Adaptive(speculative, machine.clock)


@pytest.mark.parametrize("step_seconds", [1.3, 2.0, 3.0])
def test_text_that_no_draft_fits_costs_three_percent_at_most(step_seconds: float) -> None:
    machine = Machine(step_seconds, accepted=0)
    adaptive = adaptive_on(machine)
    machine.decode(adaptive, 2000)
    assert machine.decode(adaptive, 5000) >= 0.97


@pytest.mark.parametrize(("step_seconds", "accepted"), [(1.3, 3), (2.0, 3), (2.5, 3)])
def test_where_drafts_fit_nearly_all_calls_are_steps(step_seconds: float, accepted: float) -> None:
    machine = Machine(step_seconds, accepted)
    adaptive = adaptive_on(machine)
    fixed = Machine(step_seconds, accepted)
    best = sum(len(fixed.step(0)) for _ in range(2000)) / fixed.now
    assert machine.decode(adaptive, 5000) >= 0.97 * best
    assert machine.calls.count("plain") <= 0.01 * len(machine.calls)


def test_plain_decoding_is_measured_more_often_where_steps_gain_little() -> None:
    calls = {}
    for seconds in (1.3, 3.4):  # a step emits 3.8 tokens
        machine = Machine(seconds, accepted=3)
        machine.decode(adaptive_on(machine), 20000)
        calls[seconds] = len(machine.calls) / machine.calls.count("plain")
    assert calls[1.3] > 200 and calls[3.4] < 100


@pytest.mark.parametrize("step_seconds", [1.7, 1.8, 1.9, 1.95, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_gain_of_a_few_percent_is_not_given_up(step_seconds: float, seed: int) -> None:
    """A step emits 2.04 tokens on average: chance alone makes many in a row lose."""
    machine, fixed = Machine(step_seconds, accepted=1.05, seed=seed), Machine(step_seconds, accepted=1.05, seed=seed)
    best = max(1.0, sum(len(fixed.step(0)) for _ in range(3000)) / fixed.now)
    assert machine.decode(adaptive_on(machine), 6000) >= 0.97 * best


def test_speculation_comes_back_when_the_text_changes() -> None:
    machine = Machine(2.0, accepted=0)
    adaptive = adaptive_on(machine)
    machine.decode(adaptive, 4000)
    machine.accepted = 3
    machine.decode(adaptive, LONGEST_PAUSE + 100)
    machine.calls.clear()
    machine.decode(adaptive, 1000)
    assert machine.calls.count("step") > 0.9 * len(machine.calls)


def test_the_first_loss_is_bounded() -> None:
    machine = Machine(2.0, accepted=0)
    adaptive = adaptive_on(machine)
    count = machine.decode(adaptive, 30) * machine.now
    assert machine.now - count * PLAIN_SECONDS <= BUDGET + 6  # and the steps before plain calls had a price


def test_a_plain_call_leaves_the_rest_of_the_draft() -> None:
    machine = Machine(2.0, accepted=0)
    adaptive = adaptive_on(machine)
    while "plain" not in machine.calls:
        adaptive(cast(Conversation, machine), 0)
    assert machine.drafts[:3, 0].tolist() == [1, 2, 3] and not adaptive.speculated


def test_the_call_that_opens_a_graph_does_not_count() -> None:
    machine = Machine(2.0, accepted=0)
    machine.opening = 100.0
    adaptive = adaptive_on(machine)
    machine.decode(adaptive, 200)
    assert machine.calls.count("plain") > machine.calls.count("step")


def test_a_cost_that_was_measured_on_a_slow_machine_is_measured_again() -> None:
    machine = Machine(1.6, accepted=0.3)
    machine.slowness = 3.0
    adaptive = adaptive_on(machine)
    while not adaptive._plain.known or not adaptive.speculated:
        adaptive(cast(Conversation, machine), 0)
    machine.slowness = 1.0
    machine.decode(adaptive, 3000)
    assert machine.decode(adaptive, 3000) >= 0.97


def test_forced_tokens_are_stepped_through_while_drafts_pause() -> None:
    """As far as they pay by themselves; and they do not make drafts look better than they are."""
    machine = Machine(step_seconds=2.5, accepted=0)
    adaptive = adaptive_on(machine)
    machine.decode(adaptive, 2000)
    for forced, expected in (1, "plain"), (2, "step"), (9, "step"), (0, "plain"):
        machine.forced = lambda count=forced: [0] * count  # type: ignore[misc]
        machine.calls.clear()
        for _ in range(20):
            adaptive(cast(Conversation, machine), 0)
        assert machine.calls == [expected] * 20
