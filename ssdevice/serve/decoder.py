"""Decodes requests one after another in the session's thread, while others wait in a queue of
bounded length.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, closing
from time import monotonic

from ssdevice.errors import InputError
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.opened import in_worker
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.sampling.structure import call_structure
from ssdevice.runtime.session import Session
from ssdevice.serve.guard import Refusal
from ssdevice.serve.metrics import Metrics
from ssdevice.serve.request import Request
from ssdevice.text.thoughts import opens_thought
from ssdevice.text.tools import answer_text

END_OF_PROMPT = 32
"""More tokens than a template writes after ``<think>``, or writes that as."""
BETWEEN_S = 0.02
"""Between two pieces of a stream: sending each token by itself would take a tenth of the model's
time on two cores.
"""
COMPILERS = 2
"""Structures that are compiled at the same time: one that takes long does not hold up others."""


class Decoder:
    """The session and its queue. ``most``: requests that may wait while one is decoded."""

    def __init__(self, session: Session, metrics: Metrics, most: int) -> None:
        self.session = session
        self.metrics = metrics
        self.most = most
        self.pending = 0
        self._turn = asyncio.Lock()
        self._compilers = ThreadPoolExecutor(COMPILERS, "structures")

    async def answers(self, request: Request) -> AsyncGenerator[Generation, None]:
        """The answer as it grows: first when its first call has been made, last when it is whole.

        It does not change while the caller looks at it. Closing the iterator cancels the request
        after the current call of the model. Raises Refusal, also if the queue is full.
        """
        async with (
            self._admitted(request),
            aclosing(decode(self.session, request, self.metrics)) as answers,
        ):
            async for answer in answers:
                yield answer

    async def verified(self, call: Callable[[], bytes]) -> bytes:
        """What a call in the session's thread returns.

        Raises Refusal, also if the queue is full.
        """
        async with self._admitted():
            return await asyncio.wrap_future(self.session.worker.submit(call))

    @asynccontextmanager
    async def _admitted(self, request: Request | None = None) -> AsyncIterator[None]:
        """A turn, when the request's structure is compiled: others are answered meanwhile.

        Raises Refusal if the queue is full, and for what goes wrong before the turn or in it.
        """
        if self.pending > self.most:
            wait = max(1, math.ceil(self.pending * self.metrics.mean_seconds))
            raise Refusal(
                f"{self.most} requests wait already; try again in {wait} s",
                429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )
        self.pending += 1
        try:
            if request is not None and (request.forced or request.sampling.get("structure")):
                compiled = self._compilers.submit(_compile, self.session, request)
                await asyncio.wrap_future(compiled)
            async with self._turn:
                yield
        except Exception as error:
            raise Refusal.of(error) from error
        finally:
            self.pending -= 1


@in_worker
def decode(session: Session, request: Request, metrics: Metrics) -> Iterator[Generation]:
    """The answer as it grows, see ``Decoder.answers``."""
    if request.app != session.app:
        session.use(request.app)
    ids = _ids(session, request)
    answers = session.growing(
        ids,
        max_tokens=request.max_tokens or session.engine.geometry.context,
        stop=request.stop,
        mode=session.mode(speculate=True),
        sampling=_sampling(session, request),
        continues=request.messages is None,
    )
    told = 0.0
    answer = next(answers)
    if request.tools:
        end = answer_text(session.tokenizer, ids[-END_OF_PROMPT:])
        answer.thinking = opens_thought(end)
    try:
        with closing(answers):  # an answer that is left has its reason then
            while answer.reason is None:
                if monotonic() - told > BETWEEN_S:
                    yield answer
                    told = monotonic()
                answer = next(answers)
    finally:
        metrics.count(answer)
    yield answer


def _compile(session: Session, request: Request) -> None:
    session.compile(_sampling(session, request))


def _ids(session: Session, request: Request) -> list[int]:
    """The prompt's tokens."""
    if request.messages is not None:
        return session.prompt_ids(
            messages=request.messages, tools=request.tools, template=request.template
        )
    if isinstance(request.prompt, str):
        context = session.engine.geometry.context
        return session.tokenizer.encode(request.prompt, context, special=True)
    return list(request.prompt)


def _sampling(session: Session, request: Request) -> Sampling:
    asked = {**request.sampling, "logprobs": request.logprobs}
    tokenizer = session.tokenizer
    if request.tools:
        style = request.style(tokenizer.chat.for_tools)
        if style is None:
            raise InputError(
                "calls cannot be read in the form that this model's chat template gives them; "
                "tool_choice can force one"
            )
        if request.forced:
            asked["structure"] = call_structure(request.forced, style, tokenizer)
    return session.sampling(**asked) if request.samples else Sampling(**asked)
