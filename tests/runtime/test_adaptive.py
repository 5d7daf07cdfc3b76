"""Speculation pauses where it does not pay, comes back where it does, and changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import cast

import pytest

from ssdevice.runtime.adaptive import CREDIT, SHARE, Adaptive
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import speculative
from tests.runtime.timed_machine import GAMMA, QUIET, SHARED, Machine, Noise, fit_for

COSTS = (1.2, 1.4, 1.6, 1.8, 2.1)
"""Of a step, in plain calls."""


def adaptive_on(machine: Machine) -> Adaptive:
    return Adaptive(speculative, machine.clock)


def best(cost: float, tokens: float) -> float:
    """Tokens per plain call's time of the better fixed choice."""
    return max(1.0, tokens / cost)


@pytest.mark.parametrize("noise", [QUIET, SHARED], ids=["quiet", "shared"])
@pytest.mark.parametrize("gain", [0.9, 1.1, 1.2, 1.5])
@pytest.mark.parametrize("cost", COSTS)
def test_what_is_better_by_ten_percent_is_found_in_every_run(
    cost: float, gain: float, noise: Noise
) -> None:
    tokens = max(1.0, cost * gain)
    for seed in range(6):
        machine = Machine(cost, fit_for(tokens), seed, noise)
        adaptive = adaptive_on(machine)
        machine.decode(adaptive, 2000)
        assert machine.decode(adaptive, 2500) >= 0.95 * best(cost, tokens), seed


@pytest.mark.parametrize("cost", COSTS)
def test_text_on_which_steps_begin_to_pay_is_noticed(cost: float) -> None:
    """Steps gain 15 % from the 1000th call on, after text that no draft fits."""
    for seed in range(6):
        machine = Machine(
            cost, chain(repeat(0.0, 1000), repeat(fit_for(1.15 * cost))), seed, SHARED
        )
        adaptive = adaptive_on(machine)
        machine.decode(adaptive, 2500)
        assert machine.decode(adaptive, 2000) >= 0.95 * 1.15, seed


@pytest.mark.parametrize("cost", COSTS)
def test_text_on_which_steps_no_longer_pay_is_noticed(cost: float) -> None:
    for seed in range(6):
        machine = Machine(cost, chain(repeat(fit_for(1.3 * cost), 1000), repeat(0.0)), seed, SHARED)
        adaptive = adaptive_on(machine)
        while len(machine.calls) < 1000:
            adaptive(cast(Conversation, machine), 0)
        assert machine.decode(adaptive, 2000) >= 0.95, seed


def test_good_and_bad_stretches_of_text_are_decoded_faster_than_by_either_kind_of_call() -> None:
    def fits(cost: float) -> Iterator[float]:
        while True:
            yield from repeat(fit_for(1.6 * cost), 300)
            yield from repeat(0.0, 1200)

    for cost in COSTS:
        machine = Machine(cost, fits(cost), 1, SHARED)
        steps = Machine(cost, fits(cost), 1)
        fixed = sum(len(steps.step(0)) for _ in range(6000)) / steps.spent
        assert machine.decode(adaptive_on(machine), 12000) >= 1.02 * max(1.0, fixed), cost


@pytest.mark.parametrize("cost", COSTS)
def test_text_that_no_draft_fits_costs_three_percent_on_a_busy_machine(cost: float) -> None:
    speeds = []
    for seed in range(6):
        machine = Machine(cost, 0.0, seed, SHARED)
        speeds.append(machine.decode(adaptive_on(machine), 4000))
    assert sum(speeds) / len(speeds) >= 0.97 and min(speeds) >= 0.96


@pytest.mark.parametrize("cost", [1.3, 2.0, 3.0])
def test_text_that_no_draft_fits_costs_three_percent_at_most(cost: float) -> None:
    machine = Machine(cost, 0.0)
    adaptive = adaptive_on(machine)
    machine.decode(adaptive, 2000)
    assert machine.decode(adaptive, 5000) >= 0.97


@pytest.mark.parametrize("cost", [1.3, 2.0, 2.5])
def test_where_drafts_fit_nearly_all_calls_are_steps(cost: float) -> None:
    machine = Machine(cost, fit_for(3.8))
    adaptive = adaptive_on(machine)
    assert machine.decode(adaptive, 5000) >= 0.97 * 3.8 / cost
    machine.calls.clear()
    machine.decode(adaptive, 5000)
    assert machine.calls.count("plain") <= 0.01 * len(machine.calls)


def test_plain_decoding_is_measured_more_often_where_steps_gain_little() -> None:
    calls = {}
    for cost in (1.3, 3.4):
        machine = Machine(cost, fit_for(3.8))
        machine.decode(adaptive_on(machine), 20000)
        calls[cost] = len(machine.calls) / machine.calls.count("plain")
    assert calls[1.3] > 100 and calls[3.4] < 50


@pytest.mark.parametrize("cost", [1.7, 1.8, 1.9, 1.95, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_gain_of_a_few_percent_is_not_given_up(cost: float, seed: int) -> None:
    """A step emits 2.04 tokens on average: chance alone makes many in a row lose."""
    machine = Machine(cost, fit_for(2.04), seed)
    assert machine.decode(adaptive_on(machine), 6000) >= 0.97 * best(cost, 2.04)


def test_the_first_loss_is_bounded() -> None:
    machine = Machine(2.0, 0.0)
    count = machine.decode(adaptive_on(machine), 200) * machine.spent
    assert machine.spent - count <= CREDIT + 10  # before a step has a price, and beyond chance


def test_a_pause_pays_for_the_trial_before_it() -> None:
    machine = Machine(2.0, 0.0)
    machine.decode(adaptive_on(machine), 2000)
    trials = []
    rest = machine.calls[100:]
    while "step" in rest:
        rest = rest[rest.index("step") :]
        steps = rest.index("plain")
        rest = rest[steps:]
        pause = rest.index("step") if "step" in rest else 0
        trials.append((steps, pause))
    assert len(trials) > 5
    for steps, pause in trials[:-1]:  # each step has lost one call
        assert pause == pytest.approx(steps / SHARE, abs=2)


def test_a_plain_call_leaves_the_rest_of_the_draft() -> None:
    machine = Machine(2.0, 0.0)
    adaptive = adaptive_on(machine)
    while "plain" not in machine.calls:
        adaptive(cast(Conversation, machine), 0)
    assert machine.drafts[:-1, 0].tolist() == [*range(1, GAMMA)] and not adaptive.speculated


@pytest.mark.parametrize("noise", [QUIET, SHARED], ids=["quiet", "shared"])
@pytest.mark.parametrize("fit", [0.0, 0.3, 0.6, 0.8])
def test_steps_of_two_lengths_are_judged_by_what_each_costs(fit: float, noise: Noise) -> None:
    def steps(machine: Machine) -> Iterator[bool]:
        """Two short steps, then one of all drafts."""
        while True:
            yield from (True, True, False)

    for seed in range(4):
        machine = Machine(1.8, fit, seed, noise)
        always = Machine(1.8, fit, seed)
        short = steps(machine)
        fixed = steps(always)
        adaptive = Adaptive(
            lambda conversation, last: conversation.step(last, next(short)),  # noqa: B023
            machine.clock,
        )
        machine.decode(adaptive, 2000)
        speed = sum(len(always.step(0, next(fixed))) for _ in range(3000)) / always.spent
        assert machine.decode(adaptive, 3000) >= 0.95 * max(1.0, speed), seed
        assert adaptive._price == pytest.approx(0.2, rel=0.3)


def test_the_call_that_opens_a_graph_does_not_count() -> None:
    machine = Machine(2.0, 0.0, noise=Noise(opening=100.0))
    machine.decode(adaptive_on(machine), 200)
    assert machine.calls.count("plain") > machine.calls.count("step")


def test_a_call_that_takes_no_time_does_not_count() -> None:
    machine = Machine(2.0, 0.0)
    adaptive = Adaptive(speculative, clock=lambda: 0.0)
    machine.decode(adaptive, 200)
    assert {"step", "plain"} == set(machine.calls)


def test_a_machine_that_slows_down_or_speeds_up_does_not_change_the_choice() -> None:
    """Costs are compared between neighbours: what was measured in a slow minute means the same in a
    fast one.
    """
    for slow, fast in ((3.0, 1.0), (1.0, 3.0)):
        machine = Machine(1.6, fit_for(1.3))
        machine.slowness = slow
        adaptive = Adaptive(speculative, machine.clock)
        machine.decode(adaptive, 500)
        machine.slowness = fast
        assert machine.decode(adaptive, 3000) >= 0.97


def test_forced_tokens_are_stepped_through_while_drafts_pause() -> None:
    """As far as they pay by themselves; and they do not make drafts look better than they are."""
    machine = Machine(2.5, 0.0)
    adaptive = adaptive_on(machine)
    while adaptive._paused < 100:
        adaptive(cast(Conversation, machine), 0)
    for forced, expected in (1, "plain"), (2, "step"), (9, "step"), (0, "plain"):
        machine.forced = lambda count=forced: [0] * count  # type: ignore[misc]
        machine.calls.clear()
        for _ in range(20):
            adaptive(cast(Conversation, machine), 0)
        assert machine.calls == [expected] * 20
