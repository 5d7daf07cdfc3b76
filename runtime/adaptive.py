"""Speculative decoding where it pays: plain calls while drafts are rejected, so that no text is slower than plainly.

Both kinds of calls emit the model's own tokens, so the answer does not depend on which is chosen, only its speed does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import Advance

BUDGET, TRIAL = 12.0, 4.0
"""Loss, in plain calls, at which steps pause: at first and while they win, and in the trials after a pause."""
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 32, 1024, 4
"""Tokens decoded plainly before the next trial. It grows from trial to trial, unless steps have won in the end."""
MOST = 2 * BUDGET
"""Bound on the total that is remembered as won or lost, so that a text of another kind can change it."""
CALIBRATED, STALE = 4, 64
"""Steps before the first plain calls, which tell what plain decoding costs, and before one that tells it again."""
CLEAR, LONGER = 0.5, 4
"""Plain calls that a step gains where there is no doubt; plain decoding is measured so many times less often then."""
TIMES, ENOUGH = 8, 3
"""A cost is the median of the last TIMES calls, and known from ENOUGH on."""


class _Cost:
    """Seconds of a kind of call: the median of the last ones, without the very first, which opens a graph."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=TIMES)
        self._opened = False
        self.seconds = 0.0

    @property
    def known(self) -> bool:
        return len(self._times) >= ENOUGH

    def add(self, seconds: float) -> None:
        if self._opened:
            self._times.append(seconds)
            self.seconds = median(self._times)
        self._opened = True


class Adaptive:
    """An ``Advance`` that measures what steps and plain calls cost and what steps emit.

    Steps pause when, since their best moment, they have lost more than a budget of plain calls against plain decoding
    (a cumulative sum test). It serves one answer after another and remembers what it learned. ``step``: how a step
    is made; if it returns no tokens, there is no draft and the call is a plain one. ``clock``: in seconds.
    """

    def __init__(self, step: Advance, clock: Callable[[], float] = perf_counter) -> None:
        self._step_once, self._clock = step, clock
        self._plain, self._step = _Cost(), _Cost()
        self._lost = 0.0  # plain calls that steps have lost since their best moment
        self._won = 0.0  # plain calls that they have won in the end, or lost
        self._steps = 0  # since the last plain call
        self._gained = 0.0  # plain calls that these steps have won, or lost
        self._pause = FIRST_PAUSE
        self._paused = 0  # tokens to decode plainly from now on
        self.speculated = False
        """Whether the last call was a step."""

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step or from a plain call."""
        clear = self._gained > CLEAR * self._steps
        until = (LONGER * STALE if clear else STALE) if self._plain.known else CALIBRATED
        certain = self._certain(conversation)
        self.speculated = certain or (self._paused == 0 and self._steps < until)
        if self.speculated:
            tokens = self._by_step(conversation, last, certain)
            self.speculated = bool(tokens)
            return tokens or self._plainly(conversation, last)
        token = self._plainly(conversation, last)
        # What follows the draft's first tokens still fits, if that is what the model said.
        conversation.drafts[:-1] = conversation.drafts[1:].copy()
        self._paused = max(0, self._paused - 1)
        if self._plain.known:
            self._steps, self._gained = 0, 0.0
        return token

    def _certain(self, conversation: Conversation) -> bool:
        """Whether forced tokens alone make a step worth its time, however good the drafts are."""
        forced = min(len(conversation.forced()), len(conversation.drafts))
        return forced > 0 and self._plain.known and (forced + 1) * self._plain.seconds > self._step.seconds

    def _plainly(self, conversation: Conversation, last: int) -> Sequence[int]:
        start = self._clock()
        token = conversation.step_plain(last)
        self._plain.add(self._clock() - start)
        return (token,)

    def _by_step(self, conversation: Conversation, last: int, certain: bool) -> Sequence[int]:
        start = self._clock()
        tokens = self._step_once(conversation, last)
        if not tokens:
            return tokens
        self._step.add(self._clock() - start)
        if certain:  # it says nothing about the drafts
            return tokens
        self._steps += 1
        if self._plain.known and self._steps > 1:  # the first draft after a plain call is an old one
            gained = len(tokens) - self._step.seconds / self._plain.seconds
            self._gained += gained
            self._lost = max(0.0, self._lost - gained)
            self._won = max(-MOST, min(MOST, self._won + gained))
            if self._won > 0:
                self._pause = FIRST_PAUSE
            if self._lost > (BUDGET if self._pause == FIRST_PAUSE else TRIAL):
                self._lost, self._paused = 0.0, self._pause
                self._pause = min(GROWTH * self._pause, LONGEST_PAUSE)
        return tokens
