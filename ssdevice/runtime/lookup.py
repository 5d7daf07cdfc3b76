"""Drafts that repeat the text, beside those of the streams: prompt lookup (LLMA, 2304.04487).

Where the last tokens occurred before, what followed them then is a draft that costs nothing.
Streams are right more often in an app's own format, lookup in open text, names and quotations, so
the better one is used. Drafts only affect the speed, never the answer.
"""

from collections.abc import Sequence

from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.phrases import Phrases

SHORTEST = 3
LONGEST = 16
"""Tokens that must have occurred before, and how many are compared to find the occurrence with the
longest match.
"""
ALONE = 2
"""The fewest without streams, which are right more often than so short a match; open text is 3 %
faster with it.
"""
CERTAIN = 8
"""After a match of fewer tokens, a short step is enough if there is one; see docs/performance.md."""
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


class Lookup:
    """An ``Advance`` (``ssdevice.runtime.loop``): a step with drafts that may repeat the text of
    the conversation.

    ``lead``: how much more often lookup was right than the first candidate of a stream, where the
    two differed. Drafts are looked up while it is positive, and learned from in any case. It lasts
    from one answer to the next.
    """

    shortest = SHORTEST
    lead = START
    phrases: Phrases | None = None

    def __init__(self) -> None:
        self._rest = 0
        self._text: list[int] = []
        self._ends: dict[NGram, list[int]] = {}  # where so many tokens end and another follows
        self._indexed = 0  # tokens of the text whose tuples are in there
        self._differing: tuple[int, int, int] | None = (
            None  # the first such draft: its depth, lookup's, the stream's
        )
        self._matched = 0  # tokens of the first draft's match

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step; none, without a step, if a structure forbids the
        draft.
        """
        if self._rest:
            self._rest -= 1
            return conversation.step(last) if conversation.hopeful() else ()
        self._draft(conversation, last)
        if not conversation.hopeful():
            return ()
        tokens = conversation.step(last)
        if self._differing is not None and self._differing[0] < len(tokens):
            depth, looked_up, streamed = self._differing
            lead = self.lead + (looked_up == tokens[depth]) - (streamed == tokens[depth])
            self.lead = min(MOST, lead)
            if lead <= FAR:
                self.lead = START
                self._rest = REST
        return tokens

    def _draft(self, conversation: Conversation, last: int) -> None:
        """Replace drafts by those that repeat the text.

        A replaced candidate becomes the next best.
        """
        text = conversation.text
        if (
            text is not self._text or self._indexed > conversation.length
        ):  # a new prompt, or back in the text
            self._text = text
            self._indexed = 0
            self._ends.clear()
        text[conversation.length :] = [last]
        for end in range(max(self._indexed, self.shortest), len(text)):
            self._ends.setdefault(tuple(text[end - self.shortest : end]), []).append(end)
        self._indexed = len(text)
        self._differing = None
        for depth, candidates in enumerate(conversation.drafts.tolist()):
            best = candidates[0]
            (found, matched) = self._next()
            if depth == 0:
                self._matched = matched
            if found is not None and found != best:
                if self._differing is None:
                    self._differing = depth, found, best
                if self.lead > 0:
                    conversation.propose(depth, found)
                    best = found
            text.append(best)
        del text[conversation.length :]

    def _next(self) -> tuple[int | None, int]:
        """The token that followed the longest match of the text's end, and that match's tokens; the
        last occurrence wins a tie.

        Without a match a phrase's, if there is one, and 0.
        """
        text = self._text
        best = None
        longest = 0
        for end in reversed(self._ends.get(tuple(text[-self.shortest :]), ())[-RECENT:]):
            length = 0
            most = min(end, LONGEST)
            while length < most and text[end - 1 - length] == text[-1 - length]:
                length += 1
            if length > longest:
                best = text[end]
                longest = length
                if length == LONGEST:
                    break
        return self.phrases.after(
            text
        ) if best is None and self.phrases is not None else best, longest


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
        """The tokens after ``last``, from a step; none, without a step, if there is no draft to
        verify.
        """
        conversation.drafts[...] = (
            0  # where the host chooses tokens they are those of the step before
        )
        self._draft(conversation, last)
        drafted = self._differing is not None and self._differing[0] == 0 and conversation.hopeful()
        short = conversation.short > 0 and self._matched < CERTAIN
        return conversation.step(last, short) if drafted or conversation.forced() else ()
