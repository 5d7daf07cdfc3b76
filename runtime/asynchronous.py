"""Answers as asynchronous iterators: a session's calls run in its own thread, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import suppress
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

from ssdevice.errors import InputError
from ssdevice.runtime.opened import OpenBundle

P = ParamSpec("P")
T = TypeVar("T")


S = TypeVar("S", bound=OpenBundle)


def in_worker(call: Callable[Concatenate[S, P], Iterator[T]]) -> Callable[Concatenate[S, P], AsyncGenerator[T, None]]:
    """A method whose answer is computed in ``worker``, an executor of one thread.

    A request is checked when its first piece is asked for. Cancelling the task, or closing the iterator, ends the
    answer after the call of the model that is under way.
    """

    @wraps(call)
    async def pieces(session: S, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        answer = await _done(session, partial(call, session, *args, **kwargs))
        assert isinstance(answer, Generator)
        try:
            while (piece := await _done(session, partial(next, answer, None))) is not None:
                yield piece
        finally:
            with suppress(InputError):  # closed meanwhile
                await asyncio.shield(_done(session, answer.close))

    return pieces


async def _done(session: OpenBundle, call: Callable[[], T]) -> T:
    try:
        future = session.worker.submit(call)
    except RuntimeError as error:
        raise InputError("the session was closed") from error
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.running():
            session.cancel()
        raise
