"""An open bundle: its apps' engines and caches, and the conversation of the app in use."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from ssdevice import arguments
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.integrity import read_bounded
from ssdevice.errors import InputError
from ssdevice.runtime import phrases
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine, EngineOptions, OpenEngine, open_engine
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.phrases import Phrases
from ssdevice.runtime.saved import restore, save
from ssdevice.text.messages import WAITING, Chat, checked
from ssdevice.text.tokenizer import TOKENIZER_ROLE, ChatTokenizer
from ssdevice.text.tokenizer_limits import MAX_BYTES


class OpenBundle:
    """A bundle, or an engine without one, as one of its apps at a time, and a conversation with it.

    ``app``: the name of the app in use, empty without a bundle.
    ``special_tokens``: whether special tokens that are written in a conversation are read as such,
    as transformers does. Otherwise they are text, and only those of the chat template and of the
    app's instruction are tokens.
    """

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, instruction: str | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.instruction = instruction
        self.app = ""
        self.special_tokens = False
        self.phrases: Phrases | None = None
        self._bundle: Bundle | None = None
        self._options = EngineOptions()
        self._opener: OpenEngine = open_engine
        self._apps: dict[str, Conversation] = {}  # those that the session has used
        self._conversation = engine.new_conversation()
        self._chat = Chat()  # replaced by another whenever the conversation continues
        self._running: Generation | None = None  # the answer that owns the cache

    @classmethod
    def open(
        cls,
        bundle: str | Path | Bundle,
        *,
        app: str | None = None,
        options: EngineOptions | None = None,
        threads: int | None = None,
        resume: str | Path | None = None,
        opener: OpenEngine = open_engine,
    ) -> Self:
        """The session of a bundle.

        ``app``: one of its apps (default: its default app).
        ``threads``: those of ``options`` (default: 0, for all cores).
        ``resume``: a file that ``save`` wrote.
        ``opener``: opens the engines of apps; see ``ssdevice.runtime.split`` for another one.

        Raises BundleError for a folder that is not a valid bundle, InputError for an unknown app,
        or a file of another bundle or app.
        """
        if app is not None:
            arguments.text("app", app)
        if options is None:
            options = EngineOptions()
        if not isinstance(options, EngineOptions):
            raise InputError(f"options is {type(options).__name__}, expected EngineOptions")
        if threads is not None:
            options = replace(options, threads=threads)
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        found = opened.app(app)
        tokenizer = tokenizer_of(opened)
        with _closed_on_error(opener(opened, app, options)) as engine:
            session = cls(engine, tokenizer, found.instruction)
            session.app = found.name
            session._bundle = opened
            session._options = options
            session._opener = opener
            session._apps[found.name] = session._conversation
            if phrases.ROLE in opened.manifest.roles:
                session.phrases = Phrases.read(opened.file(phrases.ROLE), opened.geometry.vocab)
            if resume is not None:
                session._chat = restore(resume, opened, found.name, session._conversation)
        return session

    @property
    def bundle(self) -> Bundle:
        """The open bundle. Raises InputError for a session that was made from an engine."""
        if self._bundle is None:
            raise InputError("this session was not opened from a bundle")
        return self._bundle

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, as ``chat`` takes it: without the app's instruction.

        May be set, also to a system message only: ``chat(prompt)`` then continues it. Raises
        InputError for messages in another form or order, or in which the user does not speak next.
        """
        return [dict(message) for message in self._chat.messages]

    @messages.setter
    def messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._chat = Chat(checked(messages, WAITING))
        self._running = None

    @property
    def streams(self) -> bool:
        """Whether the model drafts; otherwise drafts only repeat the text."""
        return self._bundle is None or self._bundle.manifest.mode is not None

    def use(self, app: str) -> None:
        """Switch to another app and start over, since each adapter computes other keys and values.

        Switching back to an app takes microseconds; see ``preload``. Raises InputError for an
        unknown app.
        """
        self._conversation = self._opened(app)
        self.engine = self._conversation.engine
        self.app = app
        self.instruction = self.bundle.app(app).instruction
        self.reset()

    def engine_of(self, app: str) -> Engine:
        """The engine of an app, for further conversations. Raises InputError for an unknown app."""
        return self._opened(app).engine

    def preload(self, *apps: str) -> None:
        """Open apps (default: all) now instead of at the first ``use``.

        Raises InputError for an unknown app.
        """
        for app in arguments.texts("app", apps) or [app.name for app in self.bundle.manifest.apps]:
            self._opened(app).engine.warm()

    def _opened(self, app: str) -> Conversation:
        arguments.text("app", app)
        if self.engine.closed:
            raise InputError(f"app {app!r}: the session was closed")
        if app not in self._apps:
            known = self.bundle.app(app)
            with _closed_on_error(self._opener(self.bundle, known.name, self._options)) as engine:
                self._apps[app] = engine.new_conversation(self._conversation)
        return self._apps[app]

    def reset(self) -> None:
        """Forget the conversation."""
        self._conversation.length = 0
        self._chat = Chat()
        self._running = None

    def save(self, file: str | Path) -> None:
        """Write the conversation and what the cache holds to a file.

        ``Session.open(.., resume=file)`` goes on with it. The file fits this bundle and app only.
        Raises InputError for targets that keep the cache inside their graphs.
        """
        save(file, self.bundle, self.app, self._conversation, self._chat)

    def cancel(self) -> None:
        """End the answer under way after the call of the model that is made now.

        Any thread may call this.
        """
        self._conversation.cancelled = True

    @cached_property
    def worker(self) -> ThreadPoolExecutor:
        """The thread of asynchronous answers."""
        return ThreadPoolExecutor(1, "ssdevice")

    def close(self) -> None:
        """Release the target's memory."""
        self.worker.shutdown()
        for engine in (self.engine, *(opened.engine for opened in self._apps.values())):
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tokenizer_of(bundle: Bundle) -> ChatTokenizer:
    """The tokenizer of a bundle, with its chat format."""
    return ChatTokenizer.from_bytes(
        read_bounded(bundle.file(TOKENIZER_ROLE), MAX_BYTES), bundle.manifest.chat
    )


@contextmanager
def _closed_on_error(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    except BaseException:
        engine.close()
        raise


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=OpenBundle)


def in_worker(
    call: Callable[Concatenate[S, P], Iterator[T]],
) -> Callable[Concatenate[S, P], AsyncGenerator[T, None]]:
    """The method with its answer computed in ``worker``, a thread.

    A request is checked when its first piece is asked for. Cancelling the task, or closing the
    iterator, ends the answer after the model's current call.
    """

    @wraps(call)
    async def pieces(session: S, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        answer = await _done(session, partial(call, session, *args, **kwargs))
        assert isinstance(answer, Generator)
        try:
            while True:
                piece = await _done(session, partial(next, answer, None))
                if piece is None:
                    break
                yield piece
        finally:
            with suppress(RuntimeError):  # closed meanwhile
                # No task: asyncio complains of one that is pending when its loop ends.
                await asyncio.shield(asyncio.wrap_future(session.worker.submit(answer.close)))

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
