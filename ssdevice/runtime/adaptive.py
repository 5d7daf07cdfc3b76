"""Speculative decoding where it pays: plain calls while drafts are rejected, so that no text is
slower than plainly.

Both kinds of calls emit the model's own tokens, so the choice between them does not change the
answer, only its speed.
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
"""Steps pause when what they emitted is too little by DOUBT standard errors, or when they have lost
MOST plain calls since their best moment.
"""
CREDIT = 8
"""Tokens that steps are given at first, lest chance spoil the first answer."""
SHARE = 0.02
SHORT = 32
"""A pause lasts until what steps have lost is this share of plain decoding's time, or SHORT tokens
if they have won.
"""
PAIRS = 32
ENOUGH = 4
"""What a draft costs is the median of the last PAIRS pairs of neighbouring calls, and known from
ENOUGH on.
"""
PROBE = 2
STEPS = 3
"""Plain calls in a row that measure the cost, and the steps before them for each known pair."""
CLEAR = 0.5
RARELY = 256
"""Plain calls that a step gains where there is no doubt, and the steps before the cost is measured
then.
"""


class Adaptive:
    """An ``Advance`` that measures what a step costs and what it emits, and pauses steps that lose.

    Steps pause when they have emitted fewer tokens than they cost in plain calls, beyond chance.
    The more they have lost, the longer the pause. Then they are tried again, and what they emitted
    before is forgotten, for the text may be of another kind. What they cost is kept. It is compared
    between neighbouring calls, as a busy machine slows both kinds down.

    It serves one answer after another.

    ``step``: how a step is made. If it returns no tokens, there is no draft, and the call is plain.
    ``clock``: in seconds.
    ``speculated``: whether the last call was a step.
    """

    def __init__(self, step: Advance, clock: Callable[[], float] = perf_counter) -> None:
        self.speculated = False
        self._step_once = step
        self._clock = clock

        # What a draft costs, in plain calls; None: not known yet. A step costs one plus its drafts.
        self._price: float | None = None
        # What pairs of neighbouring calls said of it.
        self._prices: deque[float] = deque(maxlen=PAIRS)
        # The kind of a call is the number of drafts that it verifies, 0 for a plain one.
        self._opened: set[int] = set()  # kinds of calls that were made
        self._before = 0, 0.0  # the last call's kind and seconds; 0 seconds if it opened a graph

        # Steps since the last pause: their tokens, how many they are, and their drafts.
        self._emitted = CREDIT
        self._count = 0
        self._drafted = 0
        self._lost = 0.0  # plain calls that they have lost since their best moment

        self._paused = 0  # tokens to decode plainly from now on
        self._probes = 0  # plain calls to make from now on, to measure the cost
        self._steps = 0  # steps since the last plain call

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step or from a plain call."""
        if self._steps >= self._steps_before_probes():
            self._steps = 0
            self._probes = PROBE
        certain = self._is_certain(conversation)
        self.speculated = certain or not (self._paused or self._probes)
        if self.speculated:
            tokens = self._by_step(conversation, last, certain)
            self.speculated = bool(tokens)
            return tokens or self._plainly(conversation, last)
        tokens = self._plainly(conversation, last)
        self._probes = max(0, self._probes - 1)
        if self._paused:
            self._paused -= 1
            self._steps = 0
        return tokens

    def _steps_before_probes(self) -> int:
        if self._price is None:
            return 1
        if self._won > CLEAR * self._count:
            return RARELY
        return STEPS * len(self._prices)

    def _is_certain(self, conversation: Conversation) -> bool:
        """Whether forced tokens alone make a step worth its time, however good its drafts are."""
        drafts = len(conversation.drafts)
        forced = min(len(conversation.forced()), drafts)
        return forced > 0 and self._price is not None and self._price * drafts < forced

    def _plainly(self, conversation: Conversation, last: int) -> Sequence[int]:
        start = self._clock()
        token = conversation.step_plain(last)
        self._time(0, start)
        # What follows the draft's first tokens still fits, if those are what the model said.
        conversation.drafts[:-1] = conversation.drafts[1:].copy()
        return (token,)

    def _by_step(self, conversation: Conversation, last: int, certain: bool) -> Sequence[int]:
        start = self._clock()
        tokens = self._step_once(conversation, last)
        if not tokens:
            # The plain call that follows measures as a probe does.
            self._steps = min(self._steps, 1)
            return tokens
        drafts = len(conversation.verified)
        self._time(drafts, start)
        if certain:  # it says nothing about the drafts
            return tokens
        self._steps += 1
        if self._price is None:
            return tokens
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
        """Take in what a step emitted, and pause if steps lose."""
        self._emitted += tokens
        self._count += 1
        self._drafted += drafts
        won = self._won
        # Where steps break even, the tokens of one have a variance of about its cost less one.
        error = sqrt(max(0.0, (self._price or 0.0) * self._drafted))
        if won >= -DOUBT * error and self._lost <= MOST:
            return
        # A trial has also lost a step less one token, for the old draft that it began with.
        self._paused = SHORT if won > 0 else int((paid - won) / SHARE)
        self._emitted = 0
        self._count = 0
        self._drafted = 0
        self._lost = 0.0

    def _time(self, kind: int, start: float) -> None:
        """Take in what a call took, and after a call of the other kind what a draft costs."""
        seconds = self._clock() - start if kind in self._opened else 0.0
        self._opened.add(kind)
        other, before = self._before
        self._before = kind, seconds
        neighbours = (kind == 0) != (other == 0)
        if not (neighbours and seconds and before):
            return
        ratio = seconds / before if kind else before / seconds
        self._prices.append((ratio - 1) / (kind or other))
        if len(self._prices) >= ENOUGH:
            self._price = median(self._prices)
