"""Decodes requests one after another in the session's thread, while others wait in a queue of bounded length."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from time import monotonic

from ssdevice.errors import InputError
from ssdevice.runtime.asynchronous import in_worker
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session
from ssdevice.runtime.structure.calls import call_structure
from ssdevice.serve.metrics import Metrics
from ssdevice.serve.refusal import Refusal
from ssdevice.serve.request import Request

NO_STYLE = "calls cannot be read in the form that this model's chat template gives them; tool_choice can force one"
BETWEEN_S = 0.02
"""Between two pieces of a stream: sending each token by itself would take a tenth of the model's time on two cores."""


class Decoder:
    """The session and its queue. ``most``: requests that may wait while one is decoded."""

    def __init__(self, session: Session, metrics: Metrics, most: int) -> None:
        self.session = session
        self.metrics = metrics
        self.most = most
        self.pending = 0
        self._turn = asyncio.Lock()

    @property
    def worker(self) -> ThreadPoolExecutor:
        """The session's thread."""
        return self.session.worker

    def cancel(self) -> None:
        """End the answer under way after the call of the model that is made now."""
        self.session.cancel()

    async def answers(self, request: Request) -> AsyncGenerator[Generation, None]:
        """The answer as it grows: first when its first call has been made, last when it is whole.

        It does not change while the caller looks at it. Closing the iterator cancels the request after the call of the
        model that is under way. Raises Refusal, also if the queue is full.
        """
        if self.pending > self.most:
            wait = max(1, math.ceil(self.pending * self.metrics.mean_seconds))
            reason = f"{self.most} requests wait already; try again in {wait} s"
            raise Refusal(
                reason, 429, kind="rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": str(wait)}
            )
        self.pending += 1
        try:
            async with self._turn, aclosing(self._decode(request)) as answers:
                async for answer in answers:
                    yield answer
        except Exception as error:
            raise Refusal.of(error) from error
        finally:
            self.pending -= 1

    @in_worker
    def _decode(self, request: Request) -> Iterator[Generation]:
        session, told = self.session, 0.0
        if request.app != session.app:
            session.use(request.app)
        runs = session.runs(
            self._ids(request),
            max_tokens=request.max_tokens or session.engine.geometry.context,
            stop=request.stop,
            mode=session.mode(speculate=True),
            sampling=self._sampling(request),
        )
        next(runs, None)
        try:
            with closing(runs):
                while (answer := session.last).reason is None:
                    if not answer.tokens or monotonic() - told > BETWEEN_S:
                        yield answer
                        told = monotonic() if answer.tokens else 0.0
                    next(runs, None)
        finally:
            self.metrics.count(answer)
        yield answer

    def _ids(self, request: Request) -> list[int]:
        session, context = self.session, self.session.engine.geometry.context
        if request.messages is None:
            given = request.prompt
            return session.tokenizer.encode(given, context, special=True) if isinstance(given, str) else list(given)
        return session.prompt_ids(messages=request.messages, tools=request.tools, template=request.template)

    def _sampling(self, request: Request) -> Sampling:
        asked, tokenizer = {**request.sampling, "logprobs": request.logprobs}, self.session.tokenizer
        if request.tools:
            style = request.style(tokenizer.chat.template)
            if style is None:
                raise InputError(NO_STYLE)
            if request.forced:
                asked["structure"] = call_structure(request.forced, style, tokenizer)
        return self.session.sampling(**asked) if request.samples else Sampling(**asked)
