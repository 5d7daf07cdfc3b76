"""Speculative decoding where it pays: plain calls while drafts are rejected, so that no text is slower than plainly.

Both kinds of calls emit the model's own tokens, so the answer does not depend on which is chosen, only its speed does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import sqrt
from statistics import median
from time import perf_counter

from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import Advance

DOUBT, MOST = 1.5, 24.0
"""Steps pause when they have emitted too little by so many standard errors, or lost so many plain calls of late."""
CREDIT = 8
"""Tokens that they are given at first, lest chance spoil the first answer."""
SHARE, SHORT = 0.02, 32
"""Of plain decoding's time: what steps may lose. A pause lasts until it has paid, or SHORT tokens if steps have won."""
PAIRS, ENOUGH = 32, 4
"""A step's cost is the median of the last PAIRS ratios of neighbouring calls, and known from ENOUGH on."""
PROBE, STEPS = 2, 3
"""Plain calls in a row that measure the cost, and the steps before them for each ratio that is known."""
CLEAR, RARELY = 0.5, 256
"""Plain calls that a step gains where there is no doubt, and steps before the cost is measured then."""


class Adaptive:
    """An ``Advance`` that measures what a step costs, in plain calls, and how many tokens steps emit.

    Steps pause when they have emitted fewer tokens than they cost, beyond chance. The more they have lost, the longer
    they do; then they are tried again, and what they emitted before is forgotten, for the text may be of another kind.
    Costs are compared between neighbouring calls, as a busy machine slows both kinds down, and kept. It serves one
    answer after another. ``step``: how a step is made; if it returns no tokens, there is no draft and the call is a
    plain one. ``clock``: in seconds."""

    def __init__(self, step: Advance, clock: Callable[[], float] = perf_counter) -> None:
        self._step_once, self._clock = step, clock
        self._opened: set[bool] = set()  # kinds of calls that were made; here and below, whether it is a step
        self._before = False, 0.0  # the last call's kind and seconds, 0 if it opened a graph
        self._ratios: deque[float] = deque(maxlen=PAIRS)
        self._cost = 0.0  # of a step, in plain calls; 0: not known yet
        self._emitted, self._count = CREDIT, 0  # tokens and steps since the last pause
        self._lost = 0.0  # plain calls that they have lost since their best moment
        self._paused = 0  # tokens to decode plainly from now on
        self._steps = 0  # since the last plain call
        self._probes = 0  # plain calls to make from now on
        self.speculated = False
        """Whether the last call was a step."""

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step or from a plain call."""
        clear = self._emitted > (self._cost + CLEAR) * self._count
        if self._steps >= ((RARELY if clear else STEPS * len(self._ratios)) if self._cost else 1):
            self._steps, self._probes = 0, PROBE
        # Forced tokens alone may make a step worth its time, however good the drafts are.
        forced = min(len(conversation.forced()), len(conversation.drafts))
        certain = forced > 0 and 0 < self._cost < forced + 1
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
        self._time(False, start)
        # What follows the draft's first tokens still fits, if that is what the model said.
        conversation.drafts[:-1] = conversation.drafts[1:].copy()
        return (token,)

    def _by_step(self, conversation: Conversation, last: int, certain: bool) -> Sequence[int]:
        start = self._clock()
        if not (tokens := self._step_once(conversation, last)):
            self._steps = min(self._steps, 1)  # the plain call that follows measures as a probe does
            return tokens
        self._time(True, start)
        if certain:  # it says nothing about the drafts
            return tokens
        self._steps += 1
        if self._cost:
            self._lost = max(0.0, self._lost + self._cost - len(tokens))
            if self._steps > 1:  # the first draft after a plain call is an old one
                self._judge(len(tokens))
        return tokens

    def _judge(self, tokens: int) -> None:
        self._emitted, self._count = self._emitted + tokens, self._count + 1
        won = self._emitted - self._cost * self._count
        # Where steps break even, the variance of the tokens that one emits is about its cost less one.
        error = sqrt(max(0.0, self._cost - 1) * self._count)
        if won < -DOUBT * error or self._lost > MOST:
            # A trial has also lost a step less one token, for the old draft that it began with.
            self._paused = SHORT if won > 0 else int((self._cost - 1 - won) / SHARE)
            self._emitted, self._count, self._lost = 0, 0, 0.0

    def _time(self, step: bool, start: float) -> None:
        seconds = self._clock() - start if step in self._opened else 0.0
        self._opened.add(step)
        (kind, before), self._before = self._before, (step, seconds)
        if kind is not step and seconds and before:
            self._ratios.append(seconds / before if step else before / seconds)
            if len(self._ratios) >= ENOUGH:
                self._cost = median(self._ratios)
