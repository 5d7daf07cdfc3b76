"""Drafts that repeat the text, beside those of the streams: prompt lookup (LLMA, 2304.04487).

Where the last tokens occurred before, what followed them then is a draft that costs nothing.
Streams are right more often in an app's own format, lookup in open text, names and quotations, so
the better one is used. Drafts only affect the speed, never the answer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.phrases import Phrases

SHORTEST = 3
LONGEST = 16
"""Tokens that must have occurred before, and how many are compared to find the longest match."""
ALONE = 2
"""Tokens that must have occurred before where there are no streams, which are right more often than
so short a match. Open text is 3 % faster with it.
"""
CERTAIN = 8
"""After a shorter match a short step is enough, if there is one; see docs/performance.md."""
RECENT = 8
"""Occurrences that are compared, the last ones first."""
START = -2
MOST = 8
"""The lead that lookup begins with, and the largest that it can have, so that another text can soon
change it.
"""
FAR = -16
REST = 1024
"""A lead of the streams at which lookup rests, and for how many steps: it takes as long as a small
model's layer.
"""

NGram = tuple[int, ...]


class Difference(NamedTuple):
    """A draft of which lookup and the streams say different tokens."""

    depth: int
    looked_up: int
    streamed: int


class Lookup:
    """An ``Advance`` (``ssdevice.runtime.loop``): a step whose drafts may repeat the text.

    ``lead``: how much more often lookup was right than the first candidate of a stream, where the
    two differed. Drafts are looked up while it is positive, and learned from in any case. It lasts
    from one answer to the next.
    """

    shortest = SHORTEST
    lead = START
    phrases: Phrases | None = None

    def __init__(self) -> None:
        self._rest = 0  # steps without lookup from now on
        self._text: list[int] = []
        self._ends: dict[NGram, list[int]] = {}  # where so many tokens end and another follows
        self._indexed = 0  # tokens of the text whose tuples are in there
        self._differing: Difference | None = None  # the first one of the last draft
        self._matched = 0  # tokens of the match for the first draft

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step; none if a structure forbids the draft."""
        if self._rest:
            self._rest -= 1
            return conversation.step(last) if conversation.hopeful() else ()
        self._draft(conversation, last)
        if not conversation.hopeful():
            return ()
        tokens = conversation.step(last)
        self._learn(tokens)
        return tokens

    def _learn(self, tokens: Sequence[int]) -> None:
        """Move the lead towards what was right where lookup and the streams differed."""
        differing = self._differing
        if differing is None or differing.depth >= len(tokens):
            return
        token = tokens[differing.depth]
        lead = self.lead + (differing.looked_up == token) - (differing.streamed == token)
        self.lead = min(MOST, lead)
        if lead <= FAR:
            self.lead = START
            self._rest = REST

    def _draft(self, conversation: Conversation, last: int) -> None:
        """Replace drafts by those that repeat the text.

        A replaced candidate becomes the next best.
        """
        text = conversation.text
        # The text is another list after a prompt, and shorter after going back.
        if text is not self._text or self._indexed > conversation.length:
            self._text = text
            self._indexed = 0
            self._ends.clear()
        text[conversation.length :] = [last]
        for end in range(max(self._indexed, self.shortest), len(text)):
            self._ends.setdefault(tuple(text[end - self.shortest : end]), []).append(end)
        self._indexed = len(text)
        self._differing = None
        # Each draft is looked up after those before it, which the text has for the time being.
        for depth, candidates in enumerate(conversation.drafts.tolist()):
            best = candidates[0]
            found, matched = self._next()
            if depth == 0:
                self._matched = matched
            if found is not None and found != best:
                if self._differing is None:
                    self._differing = Difference(depth, found, best)
                if self.lead > 0:
                    conversation.propose(depth, found)
                    best = found
            text.append(best)
        del text[conversation.length :]

    def _next(self) -> tuple[int | None, int]:
        """The token that followed the longest match of the text's end, and that match's tokens.

        The last occurrence wins a tie. Without a match: what a phrase says, if there is one, and 0.
        """
        text = self._text
        best = None
        longest = 0
        ends = self._ends.get(tuple(text[-self.shortest :]), ())
        for end in reversed(ends[-RECENT:]):
            length = 0
            most = min(end, LONGEST)
            while length < most and text[end - 1 - length] == text[-1 - length]:
                length += 1
            if length > longest:
                best = text[end]
                longest = length
                if length == LONGEST:
                    break
        if best is None and self.phrases is not None:
            best = self.phrases.after(text)
        return best, longest


class LookupOnly(Lookup):
    """Lookup for a model without streams.

    Where the text does not repeat itself, ``phrases`` are drafted if there are any. ``step_short``
    verifies the drafts unless a long match makes them likely to be right.
    """

    shortest = ALONE
    lead = MOST

    def __init__(self, phrases: Phrases | None = None) -> None:
        super().__init__()
        self.phrases = phrases

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step; none if there is no draft to verify."""
        # Where the host chooses tokens, the drafts are those of the step before.
        conversation.drafts[...] = 0
        self._draft(conversation, last)
        drafted = self._differing is not None and self._differing.depth == 0
        if (drafted and conversation.hopeful()) or conversation.forced():
            return conversation.step(last, conversation.short > 0 and self._matched < CERTAIN)
        return ()
