"""Speculative decoding where it pays: plain calls while drafts are rejected, so that no text is
slower than plainly.

Both kinds of calls emit the model's own tokens, so the answer does not depend on which is chosen,
only its speed does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import sqrt
from statistics import median
from time import perf_counter

from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import Advance

DOUBT = 1.5
MOST = 24.0
"""Steps pause when they have emitted too little by so many standard errors, or lost so many plain
calls of late.
"""
CREDIT = 8
"""Tokens that they are given at first, lest chance spoil the first answer."""
SHARE = 0.02
SHORT = 32
"""Of plain decoding's time: what steps may lose.

A pause lasts until it has paid, or SHORT tokens if steps have won.
"""
PAIRS = 32
ENOUGH = 4
"""What a draft costs is the median of the last PAIRS pairs of neighbouring calls, and known from
ENOUGH on.
"""
PROBE = 2
STEPS = 3
"""Plain calls in a row that measure the cost, and the steps before them for each ratio that is
known.
"""
CLEAR = 0.5
RARELY = 256
"""Plain calls that a step gains where there is no doubt, and steps before the cost is measured
then.
"""


class Adaptive:
    """An ``Advance`` that measures what a step costs, in plain calls, and how many tokens steps
    emit.

    Steps pause when they have emitted fewer tokens than they cost, beyond chance. The more they
    have lost, the longer they do; then they are tried again, and what they emitted before is
    forgotten, for the text may be of another kind. Costs are compared between neighbouring calls,
    as a busy machine slows both kinds down, and kept. It serves one answer after another. ``step``:
    how a step is made; if it returns no tokens, there is no draft and the call is a plain one.
    ``clock``: in seconds.
    """

    def __init__(self, step: Advance, clock: Callable[[], float] = perf_counter) -> None:
        self._step_once = step
        self._clock = clock
        self._opened: set[int] = (
            set()
        )  # kinds of calls that were made; here and below, the drafts that it verifies
        self._before = 0, 0.0  # the last call's kind and seconds, 0 if it opened a graph
        self._prices: deque[float] = deque(maxlen=PAIRS)
        self._price: float | None = (
            None  # of a draft, in plain calls, None: not known yet; a step costs one plus this
        )
        # tokens, steps, and their drafts since the last pause
        self._emitted = CREDIT
        self._count = 0
        self._drafted = 0
        self._lost = 0.0  # plain calls that they have lost since their best moment
        self._paused = 0  # tokens to decode plainly from now on
        self._steps = 0  # since the last plain call
        self._probes = 0  # plain calls to make from now on
        self.speculated = False
        """Whether the last call was a step."""

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step or from a plain call."""
        rarely = RARELY if self._won > CLEAR * self._count else STEPS * len(self._prices)
        if self._steps >= (1 if self._price is None else rarely):
            self._steps = 0
            self._probes = PROBE
        # Forced tokens alone may make a step worth its time, however good the drafts are.
        forced = min(len(conversation.forced()), len(conversation.drafts))
        certain = (
            forced > 0
            and self._price is not None
            and self._price * len(conversation.drafts) < forced
        )
        self.speculated = certain or not (self._paused or self._probes)
        if self.speculated:
            tokens = self._by_step(conversation, last, certain)
            self.speculated = bool(tokens)
            return tokens or self._plainly(conversation, last)
        token = self._plainly(conversation, last)
        self._probes = max(0, self._probes - 1)
        if self._paused:
            self._paused, self._steps = self._paused - 1, 0
        return token

    def _plainly(self, conversation: Conversation, last: int) -> Sequence[int]:
        start = self._clock()
        token = conversation.step_plain(last)
        self._time(0, start)
        # What follows the draft's first tokens still fits, if that is what the model said.
        conversation.drafts[:-1] = conversation.drafts[1:].copy()
        return (token,)

    def _by_step(self, conversation: Conversation, last: int, certain: bool) -> Sequence[int]:
        start = self._clock()
        if not (tokens := self._step_once(conversation, last)):
            self._steps = min(
                self._steps, 1
            )  # the plain call that follows measures as a probe does
            return tokens
        drafts = len(conversation.verified)
        self._time(drafts, start)
        if certain:  # it says nothing about the drafts
            return tokens
        self._steps += 1
        if self._price is not None:
            paid = self._price * drafts
            self._lost = max(0.0, self._lost + 1 + paid - len(tokens))
            if self._steps > 1:  # the first draft after a plain call is an old one
                self._judge(len(tokens), drafts, paid)
        return tokens

    @property
    def _won(self) -> float:
        """Plain calls that steps have saved since the last pause."""
        return self._emitted - self._count - (self._price or 0.0) * self._drafted

    def _judge(self, tokens: int, drafts: int, paid: float) -> None:
        self._emitted, self._count, self._drafted = (
            self._emitted + tokens,
            self._count + 1,
            self._drafted + drafts,
        )
        # Where steps break even, the variance of the tokens that one emits is about its cost less
        # one.
        error = sqrt(max(0.0, (self._price or 0.0) * self._drafted))
        if (won := self._won) < -DOUBT * error or self._lost > MOST:
            # A trial has also lost a step less one token, for the old draft that it began with.
            self._paused = SHORT if won > 0 else int((paid - won) / SHARE)
            self._emitted = 0
            self._count = 0
            self._drafted = 0
            self._lost = 0.0

    def _time(self, kind: int, start: float) -> None:
        seconds = self._clock() - start if kind in self._opened else 0.0
        self._opened.add(kind)
        (other, before), self._before = self._before, (kind, seconds)
        if seconds and before and (kind == 0) != (other == 0):
            step, call = (seconds, before) if kind else (before, seconds)
            self._prices.append((step / call - 1) / (kind or other))
            if len(self._prices) >= ENOUGH:
                self._price = median(self._prices)
