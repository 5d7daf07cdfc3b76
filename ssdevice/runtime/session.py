"""An open bundle: prompts in, text out, one conversation at a time."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from ssdevice import arguments
from ssdevice.contract import PLAIN, STEP, VERIFY_PLAIN
from ssdevice.errors import InputError
from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine
from ssdevice.runtime.generation import Generation, Reason, Run
from ssdevice.runtime.lookup import Lookup, LookupOnly
from ssdevice.runtime.loop import (
    ADAPTIVE,
    MODES,
    PLAIN_STEP,
    SPECULATIVE,
    Cancelled,
    check_prompt,
    decode,
)
from ssdevice.runtime.opened import OpenBundle, in_worker
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.sampling.structure import open_grammar
from ssdevice.text.messages import ASSISTANT, ERROR, Chat, fitting, requested
from ssdevice.text.tokenizer import ChatTokenizer

DEFAULT_MAX_TOKENS = 256
LOST = (
    "this answer was ended by a newer one, by reset or by use: a session has one answer at a time"
)


@dataclass(frozen=True)
class _Turn:
    """A message of a conversation.

    ``chat``: the conversation with it, after ``dropped`` turns were left out. ``before``: the one
    that it continues; None if the message came with its whole conversation.
    """

    chat: Chat
    before: Chat | None
    dropped: int


class Session(OpenBundle):
    """Decodes with one bundle, as one of its apps at a time::

        with Session.open("bundle", threads=2) as session:
            for piece in session.generate("List the names of all customers."):
                print(piece, end="", flush=True)
            print(session.last.tokens_per_step)

    A request is checked when it is made, and a refused one changes nothing. Its answer begins when
    the first piece is requested: then it takes the KV cache, and the answer that had it can only
    raise InputError. ``last`` is the Generation of the answer that began last, updated as it grows.
    Closing the iterator of an answer cancels it. A session is not thread-safe.
    """

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, instruction: str | None = None
    ) -> None:
        super().__init__(engine, tokenizer, instruction)
        self._last: Generation | None = None
        self._running: Generation | None = None  # the answer that owns the cache
        # A step costs another time where the host chooses.
        self._adaptive: WeakKeyDictionary[Conversation, dict[bool, Adaptive]] = WeakKeyDictionary()

    @property
    def last(self) -> Generation:
        """The answer that began last; raises InputError before the first."""
        if self._last is None:
            raise InputError("nothing has been generated yet")
        return self._last

    def reset(self) -> None:
        """Forget the conversation."""
        super().reset()
        self._running = None

    def generate(
        self,
        prompt: str,
        *,
        system: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        speculate: bool = True,
        sampling: Sampling | None = None,
    ) -> Iterator[str]:
        """Pieces of the answer to a single prompt.

        When it begins, the session forgets the conversation so far.

        What the prompt begins with and the cache holds, such as the app's instruction, is not
        computed again. ``stop``: strings, also special tokens, that end the answer and are not part
        of it. ``sampling``: None for greedy. ``speculate`` does not change the answer, except with
        typical acceptance. Raises InputError for an empty prompt, ContextOverflowError for one that
        does not fit.
        """
        ids = self.prompt_ids(arguments.text("prompt", prompt), system=system)
        return _pieces(
            self.runs(
                ids, max_tokens=max_tokens, stop=stop, mode=self.mode(speculate), sampling=sampling
            )
        )

    def chat(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        overflow: str = ERROR,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        speculate: bool = True,
        sampling: Sampling | None = None,
    ) -> Iterator[str]:
        """Pieces of the answer to the next message of a conversation, which lasts until ``reset``
        or ``generate``.

        ``prompt``: the user's next message. ``messages``: instead, a whole conversation in OpenAI's
        form (roles system, user, assistant, tool), which the session then has. Only tokens after
        what the cache holds are computed. ``system``: the system message. ``tools``: JSON schemas
        of functions, ``template``: other arguments of the chat template; all three last as long as
        the conversation. An app's instruction goes before each message of the user, also before
        those in ``messages``. ``overflow``: ``"drop-oldest"`` forgets the oldest turns of a
        conversation that does not fit, never the system message; ``last.dropped`` counts them.
        Raises the errors of ``generate``, and InputError for messages in another form or order, or
        what the template does not read.
        """
        chat = requested(self._chat, prompt, messages, system, tools, template)
        ids, kept = fitting(chat, self._ids, self.engine.geometry.context, overflow, max_tokens)
        turn = _Turn(
            kept, self._chat if messages is None else None, len(chat.turns) - len(kept.turns)
        )
        return _pieces(
            self._begin_later(ids, max_tokens, stop, self.mode(speculate), sampling, turn)
        )

    agenerate = in_worker(generate)
    achat = in_worker(chat)

    def prompt_ids(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a prompt or a whole conversation in the chat format that this app was
        trained with.

        Arguments and errors are those of ``chat``.
        """
        return self._ids(requested(Chat(), prompt, messages, system, tools, template))

    def _ids(self, chat: Chat) -> list[int]:
        return self.tokenizer.chat_ids(chat, self.instruction, self.engine.geometry.context)

    def sampling(self, **asked: Any) -> Sampling:
        """``Sampling`` as asked for, and in everything else as the model's
        ``generation_config.json`` recommends.
        """
        return Sampling.sampled(
            self._bundle.manifest.sampling if self._bundle is not None else None, **asked
        )

    def mode(self, speculate: bool) -> str:
        """The decoding mode that fits the bundle's functions: ADAPTIVE or one of MODES."""
        if arguments.flag("speculate", speculate) and STEP in self.engine.functions:
            return ADAPTIVE if PLAIN in self.engine.functions else SPECULATIVE
        return "plain" if PLAIN in self.engine.functions else PLAIN_STEP

    def runs(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        mode: str = SPECULATIVE,
        sampling: Sampling | None = None,
    ) -> Generator[Run, None, None]:
        """``generate`` call by call, with tokens and drafts. ``mode``: ADAPTIVE or one of MODES."""
        return self._begin_later(
            arguments.wholes("prompt", prompt), max_tokens, stop, mode, sampling
        )

    def _begin_later(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop: Sequence[str],
        mode: str,
        sampling: Sampling | None,
        turn: _Turn | None = None,
    ) -> Generator[Run, None, None]:
        """Check a request without changing anything.

        ``turn``: None starts a new conversation. When the answer begins, it takes the cache of the
        app in use now; it goes on as long as it owns it.
        """
        max_tokens, stop = (
            arguments.whole("max_tokens", max_tokens, 1),
            arguments.texts("stop", stop),
        )
        if mode not in (ADAPTIVE, *MODES):
            raise InputError(
                f"no decoding mode {mode!r}; choose one of {', '.join((ADAPTIVE, *MODES))}"
            )
        shared = self._conversation.shared(prompt) if turn else 0
        check_prompt(self.engine.geometry, prompt[shared:], shared)
        conversation = self._conversation
        output = self.tokenizer.output(stop)
        chooser = self._chooser(prompt, mode, sampling)
        inexact = (
            sampling is not None
            and bool(sampling.typical_acceptance)
            and mode in (SPECULATIVE, ADAPTIVE)
        )

        def runs() -> Generator[Run, None, None]:
            before = turn.before if turn else None
            if self._conversation is not conversation or (
                before is not None and before is not self._chat
            ):
                raise InputError(LOST)
            conversation.length = begun = conversation.shared(prompt)
            if before is None:
                self._chat = Chat()
            answer = self._last = self._running = Generation(
                len(prompt),
                cached_tokens=begun,
                dropped=turn.dropped if turn else 0,
                inexact=inexact,
            )
            conversation.chosen_by(chooser)
            conversation.cancelled = False
            adaptive = self._adaptive_of(conversation) if mode == ADAPTIVE else None
            steps = decode(
                conversation, prompt[begun:], adaptive or MODES[mode], output.push, max_tokens
            )
            try:
                while answer.reason is None and not conversation.cancelled:
                    if self._running is not answer:
                        raise InputError(LOST)
                    clock = perf_counter()
                    native = conversation.cache.native_seconds
                    alone = conversation.cache.alone
                    run = next(steps)
                    drafted = adaptive.speculated if adaptive else mode == SPECULATIVE
                    run.drafts = conversation.verified if drafted and answer.tokens else None
                    if run.reason is not None and run.reason is not Reason.STOP:
                        run.text += output.finish()
                    answer.alone += conversation.cache.alone - alone
                    answer.add(
                        run, perf_counter() - clock, conversation.cache.native_seconds - native
                    )
                    if chooser is not None:
                        answer.logprobs = chooser.logprobs[: len(answer.tokens)]
                    yield run
            except Cancelled:
                return
            finally:
                answer.reason = answer.reason or Reason.CANCELLED
                if turn and answer.tokens and self._running is answer:
                    self._chat = turn.chat.then(ASSISTANT, answer.text)

        return runs()

    def _chooser(
        self, prompt: Sequence[int], mode: str, sampling: Sampling | None
    ) -> Chooser | None:
        """What chooses the tokens of an answer; None: the graph does."""
        if sampling is None or sampling.greedy:
            return None
        if VERIFY_PLAIN not in self.engine.functions:
            how = "for sampling, structures and log-probabilities export it with --choose host"
            raise InputError(
                f"{self.engine.source}: this bundle chooses tokens in its graph, greedily; {how}"
            )
        if mode == PLAIN_STEP:
            raise InputError(
                f"mode {mode!r} takes the graph's own tokens; with sampling choose 'plain'"
            )
        vocab = self.engine.geometry.vocab
        grammar = (
            open_grammar(sampling.structure, self.tokenizer, vocab) if sampling.structure else None
        )
        return Chooser(
            sampling,
            prompt,
            self.tokenizer.stop_ids,
            vocab,
            grammar,
            self.engine.kernels,
            self.engine.source,
        )

    def _adaptive_of(self, conversation: Conversation) -> Adaptive:
        known = self._adaptive.setdefault(conversation, {})
        chosen = conversation.chooser is not None
        if chosen not in known:
            known[chosen] = Adaptive(Lookup() if self.streams else LookupOnly(self.phrases))
        return known[chosen]


def _pieces(runs: Generator[Run, None, None]) -> Iterator[str]:
    with closing(runs):
        for run in runs:
            if run.text:
                yield run.text
