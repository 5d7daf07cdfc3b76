"""A request to a session, checked, and the answer that grows from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.generation import Generation, Reason, Run
from ssdevice.runtime.loop import SPECULATIVE, Advance
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.text.messages import Chat
from ssdevice.text.stream import TextOutput


@dataclass(frozen=True)
class Turn:
    """A message of a conversation.

    ``chat``: the conversation with it, after ``dropped`` turns were left out.
    ``before``: the one that it continues; None if the message came with its whole conversation.
    """

    chat: Chat
    before: Chat | None
    dropped: int


@dataclass(frozen=True)
class Request:
    """A checked request. Its answer begins when the first piece is asked for.

    ``conversation``: of the app that it was made to.
    ``mode``: ADAPTIVE or one of MODES (``ssdevice.runtime.loop``).
    ``output``: the text of the answer, which it may end.
    ``chooser``: None where the graph chooses.
    ``turn``: None for a single prompt, which starts a new conversation.
    ``answer``: grows with each call of the model.
    """

    conversation: Conversation
    prompt: Sequence[int]
    max_tokens: int
    mode: str
    output: TextOutput
    chooser: Chooser | None
    turn: Turn | None
    answer: Generation

    def called(self, advance: Advance, steps: Iterator[Run]) -> Run:
        """The next run of the decoding loop, which the answer then has, too."""
        answer = self.answer
        cache = self.conversation.cache
        start = perf_counter()
        native = cache.native_seconds
        run = next(steps)
        drafted = advance.speculated if isinstance(advance, Adaptive) else self.mode == SPECULATIVE
        if drafted and answer.tokens:  # the first run is that of prefill
            run.drafts = self.conversation.verified
        if run.reason is not None and run.reason is not Reason.STOP:
            run.text += self.output.finish()
        answer.add(run, perf_counter() - start, cache.native_seconds - native)
        if self.chooser is not None:
            answer.logprobs = self.chooser.logprobs[: len(answer.tokens)]
        return run
