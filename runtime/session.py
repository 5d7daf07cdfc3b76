"""A bundle opened for use: prompts in, text out, one conversation at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from ssdevice.contract import PLAIN, STEP
from ssdevice.errors import InputError
from ssdevice.runtime.engine import Conversation, Engine, EngineOptions, open_engine
from ssdevice.runtime.generation import Generation, Run
from ssdevice.runtime.loop import Advance, Reason, check_prompt, decode, plain, plain_step, prefill, speculative
from ssdevice.text.chat_template import ChatTemplate
from ssdevice.text.tokenizer import ChatTokenizer, user_content

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

DEFAULT_MAX_TOKENS = 256
TOKENIZER = "tokenizer"
"""Role of ``tokenizer.json`` in a bundle."""
ADVANCES: dict[str, Advance] = {"speculative": speculative, "plain": plain, "plain_step": plain_step}
"""The three ways to decode: with drafts, through the T = 1 graph, and through the step without its drafts."""


@dataclass(frozen=True)
class _Opened:
    """An app that a session has used."""

    engine: Engine
    conversation: Conversation
    instruction: str


class Session:
    """Decodes with one bundle, as one of its apps at a time::

        with Session.open("bundle", threads=2) as session:
            for piece in session.generate("List the names of all customers."):
                print(piece, end="", flush=True)
            print(session.last.tokens_per_step)

    ``last`` is the Generation of the newest answer, filled while it comes. Closing the iterator of an answer cancels
    it. Not for several threads at once.
    """

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, instruction: str | None = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.instruction = instruction
        self.bundle: Bundle | None = None
        self._last: Generation | None = None
        self._running: Generation | None = None  # the answer that the cache belongs to
        self._options = EngineOptions()
        self._conversation: Conversation = engine.new_conversation()
        self._apps: dict[str, _Opened] = {}
        self._committed: list[int] = []  # what stands in the cache
        self._messages: list[dict[str, str]] = []

    @classmethod
    def open(
        cls,
        bundle: str | Path | Bundle,
        *,
        app: str | None = None,
        options: EngineOptions | None = None,
        threads: int = 0,
    ) -> Session:
        """The session of a bundle folder. ``app``: one of its apps, by default the first; ``threads``: 0 for all cores.

        Raises BundleError for a folder that is no sound bundle, InputError for an app it does not have.
        """
        from ssdevice.bundle.folder import Bundle

        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        options = options or EngineOptions(threads=threads)
        engine = open_engine(opened, app, options)
        tokenizer = ChatTokenizer.from_bytes(opened.file(TOKENIZER).read_bytes(), opened.manifest.chat)
        session = cls(engine, tokenizer, opened.app(app).instruction)
        session.bundle, session._options = opened, options
        found = opened.app(app)
        session._apps[found.name] = _Opened(engine, session._conversation, found.instruction)
        return session

    @property
    def last(self) -> Generation:
        """The newest answer; raises InputError before the first."""
        if self._last is None:
            raise InputError("nothing was generated yet")
        return self._last

    def use(self, app: str) -> None:
        """Switch to another app of the bundle. Raises InputError if it has none such.

        The conversation starts anew: a cache holds what one adapter made of the text, and another would not have made
        it so. What a session has used it keeps, so coming back takes microseconds; see ``preload``.
        """
        opened = self._opened(app)
        self.engine, self._conversation, self.instruction = opened.engine, opened.conversation, opened.instruction
        self.reset()

    def preload(self, *apps: str) -> None:
        """Open apps now that ``use`` would open late, by default all; raises InputError for one there is not."""
        if self.bundle is None:
            raise InputError("this session was not opened from a bundle")
        for app in apps or tuple(app.name for app in self.bundle.manifest.apps):
            self._opened(app).engine.warm()

    def _opened(self, app: str) -> _Opened:
        if self.bundle is None:
            raise InputError(f"app {app!r}: this session was not opened from a bundle")
        if app not in self._apps:
            instruction = self.bundle.app(app).instruction
            engine = open_engine(self.bundle, app, self._options)
            self._apps[app] = _Opened(engine, engine.conversation_beside(self._conversation), instruction)
        return self._apps[app]

    def reset(self) -> None:
        """Forget the conversation."""
        self._conversation.length = 0
        self._running = None
        self._committed, self._messages = [], []

    def generate(
        self,
        prompt: str,
        *,
        system: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        speculate: bool = True,
    ) -> Iterator[str]:
        """Pieces of the answer to one prompt; whatever was said before is forgotten.

        ``stop``: strings that end the answer and are left out of it. The answer is the same with and without
        ``speculate``. Raises InputError for an empty prompt, ContextOverflowError for one that does not fit.
        """
        ids = self.prompt_ids(prompt, system=system)
        return _pieces(self.runs(ids, max_tokens=max_tokens, stop=stop, arm=self.arm(speculate)))

    def chat(
        self,
        prompt: str,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        speculate: bool = True,
    ) -> Iterator[str]:
        """Pieces of the answer to the next message of a conversation, until ``reset`` or ``generate``.

        Only tokens that the cache does not hold yet are computed. Raises as ``generate`` does.
        """
        if not prompt.strip():
            raise InputError("the prompt is empty")
        messages = [*self._messages, {"role": "user", "content": user_content(self.instruction, prompt)}]
        template = ChatTemplate(self.tokenizer.chat)
        text = template.render(messages, add_generation_prompt=True)
        ids = self.tokenizer.encode(text, self.engine.geometry.context)
        runs = self.runs(ids, max_tokens=max_tokens, stop=stop, arm=self.arm(speculate), keep=True)
        return self._remember(runs, messages)

    def _remember(self, runs: Generator[Run, None, None], messages: list[dict[str, str]]) -> Iterator[str]:
        answer = self.last
        try:
            yield from _pieces(runs)
        finally:
            if self._running is answer:
                self._messages = [*messages, {"role": "assistant", "content": answer.text}]

    def prompt_ids(self, prompt: str, *, system: str | None = None) -> list[int]:
        """Tokens of a prompt as this app's model was taught to read it."""
        context = self.engine.geometry.context
        return self.tokenizer.prompt_ids(prompt, instruction=self.instruction, system=system, most=context)

    def arm(self, speculate: bool) -> str:
        """How to decode with what the bundle has."""
        if speculate and STEP in self.engine.functions:
            return "speculative"
        return "plain" if PLAIN in self.engine.functions else "plain_step"

    def runs(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        arm: str = "speculative",
        keep: bool = False,
    ) -> Generator[Run, None, None]:
        """An answer call by call, for those who want its tokens and drafts.

        ``arm``: one of ADVANCES. ``keep``: use what the cache already holds of this prompt's beginning.
        """
        if max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}, expected 1 or more")
        conversation = self._conversation
        shared = _shared(self._committed, prompt) if keep else 0
        conversation.length = shared
        check_prompt(conversation, prompt[shared:])
        if not keep:
            self._messages = []
        self._committed = list(prompt[:shared])
        self._last = self._running = Generation(len(prompt))
        return self._runs(conversation, self._last, prompt[shared:], max_tokens, stop, arm)

    def _runs(
        self,
        conversation: Conversation,
        answer: Generation,
        prompt: Sequence[int],
        max_tokens: int,
        stop: Sequence[str],
        arm: str,
    ) -> Generator[Run, None, None]:
        output = self.tokenizer.output(stop)
        text = ""

        def accept(run: Sequence[int]) -> tuple[Sequence[int], bool]:
            nonlocal text
            emission = output.push(run)
            text = emission.text
            return run[: emission.used], emission.stopped

        drafted = None
        try:
            clock = perf_counter()
            root = prefill(conversation, prompt)
            self._committed.extend(prompt)
            steps = decode(conversation, root, ADVANCES[arm], accept, max_tokens)
            tokens = tuple(next(steps))
            answer.prefill_seconds = perf_counter() - clock
            while True:
                answer.tokens.extend(tokens)
                answer.text += text
                yield Run(tokens, text, drafted)
                if self._running is not answer:
                    raise InputError("this answer was ended by a newer one, reset or use: a session has one at a time")
                drafted = conversation.drafts.copy() if arm == "speculative" else None
                clock, native = perf_counter(), conversation.native_seconds
                try:
                    tokens = tuple(next(steps))
                except StopIteration as end:
                    answer.reason = end.value
                    break
                answer.decode_seconds += perf_counter() - clock
                answer.native_seconds += conversation.native_seconds - native
                answer.accepted.append(len(tokens))
            if rest := "" if answer.reason is Reason.STOP else output.finish():
                answer.text += rest
                yield Run((), rest)
        finally:
            if self._running is answer:
                self._committed.extend(answer.tokens[:-1])  # the last is not in the cache
            answer.reason = answer.reason or Reason.CANCELLED

    def close(self) -> None:
        """Release the target's memory."""
        self.engine.close()
        for opened in self._apps.values():
            if opened.engine is not self.engine:
                opened.engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pieces(runs: Generator[Run, None, None]) -> Iterator[str]:
    with closing(runs):
        for run in runs:
            if run.text:
                yield run.text


def _shared(committed: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens of a prompt are committed; at least its last must be computed, to know what follows."""
    most = min(len(committed), len(prompt) - 1)
    return next((i for i in range(most) if committed[i] != prompt[i]), max(most, 0))
