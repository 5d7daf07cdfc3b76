"""Decodes requests one after another in a thread of its own, while others wait in a queue of bounded length."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Event
from time import monotonic
from typing import TypeAlias

from ssdevice.errors import InputError
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.sampling.choice import Logprobs
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session
from ssdevice.runtime.structure.calls import call_structure
from ssdevice.serve.calls import NO_STYLE, OPENINGS, forced_style, style_of
from ssdevice.serve.metrics import Metrics
from ssdevice.serve.refusal import Refusal
from ssdevice.serve.request import Request

BETWEEN_S = 0.02
"""Between two pieces of a stream: sending each token by itself would take a tenth of the model's time on two cores."""


@dataclass(frozen=True)
class Piece:
    """What calls of the model added: ``text`` that can be shown (never a call of a function), and tokens."""

    text: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()


Item: TypeAlias = Piece | Generation | BaseException
"""A piece, the end of the answer, or of the attempt."""


class Decoder:
    """The session's thread and its queue. ``most``: requests that may wait while one is decoded."""

    def __init__(self, session: Session, metrics: Metrics, most: int) -> None:
        self.session = session
        self.metrics = metrics
        self.most = most
        self.pending = 0
        self.style = style_of(session.tokenizer)

    async def pieces(self, request: Request) -> AsyncGenerator[Piece | Generation, None]:
        """An empty piece once the request has been checked, its answer's pieces, and the whole answer.

        Closing the iterator cancels the request; the thread then ends the call of the model that is under way.
        Raises Refusal, also if the queue is full.
        """
        if self.pending > self.most:
            wait = max(1, math.ceil(self.pending * self.metrics.mean_seconds))
            reason = f"{self.most} requests wait already; try again in {wait} s"
            raise Refusal(
                reason, 429, kind="rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": str(wait)}
            )
        loop, items, gone = asyncio.get_running_loop(), asyncio.Queue[Item](), Event()
        self.pending += 1

        def tell(call: Callable[..., object], *what: Item) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(call, *what)

        job = self.session.worker.submit(self._decode, request, lambda item: tell(items.put_nowait, item), gone)
        job.add_done_callback(lambda _: tell(self._done))
        try:
            while True:
                item = await items.get()
                if isinstance(item, BaseException):
                    raise Refusal.of(item)
                yield item
                if isinstance(item, Generation):
                    return
        finally:
            gone.set()
            job.cancel()

    def _done(self) -> None:
        self.pending -= 1

    def _decode(self, request: Request, put: Callable[[Item], object], gone: Event) -> None:
        try:
            if request.app != self.session.app:
                self.session.use(request.app)
            shown = _Shown(self, request)
            runs = self.session.runs(
                self._ids(request),
                max_tokens=request.max_tokens or self.session.engine.geometry.context,
                stop=request.stop,
                mode=self.session.mode(speculate=True),
                sampling=self._sampling(request),
            )
            put(Piece(""))
            text, at, told = "", 0, 0.0
            with closing(runs):
                for run in runs:
                    answer = self.session.last
                    text += shown.push(run.tokens, answer.text)
                    if request.stream and monotonic() - told > BETWEEN_S:
                        put(Piece(text, answer.tokens[at:], answer.logprobs[at:]))
                        text, at, told = "", len(answer.tokens), monotonic()
                    if gone.is_set():
                        break
            put(Piece(text, answer.tokens[at:], answer.logprobs[at:]))
            self.metrics.count(answer)
            put(answer)
        except Exception as error:
            put(error)

    def _ids(self, request: Request) -> list[int]:
        session, context = self.session, self.session.engine.geometry.context
        if request.messages is None:
            given = request.prompt
            return session.tokenizer.encode(given, context, special=True) if isinstance(given, str) else list(given)
        return session.prompt_ids(messages=request.messages, tools=request.tools, template=request.template)

    def _sampling(self, request: Request) -> Sampling:
        asked = {**request.sampling, "logprobs": request.logprobs}
        if request.forced:
            tokenizer = self.session.tokenizer
            asked["structure"] = call_structure(request.forced, forced_style(tokenizer), tokenizer)
        elif request.tools and self.style is None:
            raise InputError(NO_STYLE)
        return self.session.sampling(**asked) if request.samples else Sampling(**asked)


class _Shown:
    """The part of an answer's text that is no call of a function."""

    def __init__(self, decoder: Decoder, request: Request) -> None:
        self._hidden = bool(request.forced)
        openings = OPENINGS[decoder.style] if request.tools and decoder.style is not None else ()
        # Special tokens are no text, but a call may begin with one: tokens are searched, not the text.
        self._search = decoder.session.tokenizer.output(openings) if openings else None
        self._before = self._sent = 0

    def push(self, tokens: Sequence[int], text: str) -> str:
        """What can be shown, now that the answer's text is ``text`` and ends with these tokens."""
        end = 0 if self._hidden else len(text)
        if self._search is not None:
            self._before += len(self._search.push(tokens).text)
            end = min(end, self._before)
        start, self._sent = self._sent, max(end, self._sent)
        return text[start:end]
