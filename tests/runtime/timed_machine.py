"""A simulated machine for adaptive decoding: calls take about the time they are said to take,
drafts fit by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import exp
from random import Random
from typing import cast

import numpy as np

from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.conversation import Conversation

GAMMA = 4
PLAIN = 0.004
"""Seconds of a plain call."""


@dataclass(frozen=True)
class Noise:
    """What makes calls take longer.

    ``jitter``: the standard deviation of a time's logarithm.
    ``drift``: how many times longer the machine takes at most, another time after each ``minute``
    calls or so.
    ``outliers``: the share of calls that take five times longer.
    ``plain_after_step``, ``step_after_plain``: how many times longer such a call takes.
    ``opening``: how many times longer the first call of a kind takes.
    """

    jitter: float = 0.0
    drift: float = 1.0
    minute: int = 500
    outliers: float = 0.0
    plain_after_step: float = 1.0
    step_after_plain: float = 1.0
    opening: float = 1.0


SHARED = Noise(
    jitter=0.1,
    drift=1.6,
    outliers=0.01,
    plain_after_step=1.08,
    step_after_plain=1.04,
    opening=40.0,
)
"""As 8,400 calls of SmolLM2 in INT4 on a virtual machine of two cores, with slower minutes and more
outliers.
"""
QUIET = Noise()


class Machine:
    """A conversation whose calls take a machine's time. ``cost``: of a step, in plain calls.

    ``fits``: for each call, the probability that a draft is right if those before it are. Only what
    is left of the last draft can be right after a plain call.
    """

    def __init__(
        self, cost: float, fits: float | Iterator[float], seed: int = 0, noise: Noise = QUIET
    ) -> None:
        self.cost = cost
        self.noise = noise
        self.fits = repeat(fits) if isinstance(fits, float) else fits
        self.now = 0.0
        self.spent = 0.0  # plain calls that would have taken the time, without noise
        self.slowness = 1.0  # of everything, while others use the machine
        self.calls: list[str] = []
        self.drafts = self.verified = np.arange(GAMMA, dtype=np.int32)[:, None]
        self.forced: Callable[[], Sequence[int]] = tuple
        self._left = 0  # drafts that may be right
        self._opened: set[str] = set()
        self._draw = Random(seed)

    def clock(self) -> float:
        return self.now

    def step(self, last: int, short: bool = False) -> list[int]:
        """``short``: half of the drafts, which cost half as much."""
        self._take("short" if short else "step", (1 + self.cost) / 2 if short else self.cost)
        self.verified = self.drafts[: GAMMA // 2 if short else GAMMA]
        fit = next(self.fits)
        right = 0
        while right < min(self._left, len(self.verified)) and self._draw.random() < fit:
            right += 1
        self._left = GAMMA
        return [0] * (1 + right)

    def step_plain(self, last: int) -> int:
        self._take("plain", 1.0)
        self._left = max(0, self._left - 1) if self._draw.random() < next(self.fits) else 0
        return 0

    def _take(self, kind: str, cost: float) -> None:
        noise = self.noise
        seconds = PLAIN * cost * exp(self._draw.gauss(0, self.noise.jitter))
        if self._draw.random() < 1 / noise.minute:
            self.slowness *= noise.drift ** self._draw.uniform(-1, 1)
            self.slowness = min(max(self.slowness, 1.0), noise.drift)
        if kind not in self._opened:
            seconds *= noise.opening
        elif self._draw.random() < noise.outliers:
            seconds *= 5
        if self.calls and self.calls[-1] != kind:
            seconds *= noise.plain_after_step if kind == "plain" else noise.step_after_plain
        self._opened.add(kind)
        self.calls.append(kind)
        self.now += seconds * self.slowness
        self.spent += cost

    def decode(self, adaptive: Adaptive, tokens: int) -> float:
        """Tokens per plain call's time, without noise."""
        start = self.spent
        count = 0
        while count < tokens:
            count += len(adaptive(cast(Conversation, self), 0))
        return count / (self.spent - start)


def fit_for(tokens: float) -> float:
    """The probability with which a step emits so many tokens on average, up to GAMMA + 1."""
    low = 0.0
    high = 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if sum(middle**i for i in range(GAMMA + 1)) < tokens:
            low = middle
        else:
            high = middle
    return low
