"""An open bundle: prompts in, text out, one conversation at a time."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
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
    Advance,
    Cancelled,
    check_prompt,
    decode,
)
from ssdevice.runtime.opened import OpenBundle, in_worker
from ssdevice.runtime.request import Request, Turn
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.followers import release
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.sampling.structure import open_grammar
from ssdevice.text.messages import ASSISTANT, ERROR, Chat, fitting, requested
from ssdevice.text.tokenizer import ChatTokenizer

DEFAULT_MAX_TOKENS = 256
LOST = (
    "this answer was ended by a newer one, by reset or by use: a session has one answer at a time"
)


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
        # By whether the host chooses: a step costs another time then.
        self._adaptive: WeakKeyDictionary[Conversation, dict[bool, Adaptive]] = WeakKeyDictionary()

    @property
    def last(self) -> Generation:
        """The answer that began last; raises InputError before the first."""
        if self._last is None:
            raise InputError("nothing has been generated yet")
        return self._last

    def close(self) -> None:
        """Release the target's memory, and end the processes of structures."""
        super().close()
        release(self.tokenizer)

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

        When it begins, the session forgets the conversation so far. What the prompt begins with and
        the cache holds, such as the app's instruction, is not computed again.

        ``stop``: strings, also special tokens, that end the answer and are not part of it.
        ``speculate``: does not change the answer, except with typical acceptance.
        ``sampling``: None for greedy.

        Raises InputError for an empty prompt, ContextOverflowError for one that does not fit.
        """
        ids = self.prompt_ids(arguments.text("prompt", prompt), system=system)
        mode = self.mode(speculate)
        request = self._checked(ids, max_tokens, stop, mode, sampling)
        return _pieces(self._runs(request))

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
        """Pieces of the answer to the next message of a conversation.

        The conversation lasts until ``reset`` or ``generate``. Only tokens after what the cache
        holds are computed. An app's instruction goes before each message of the user.

        ``prompt``: the user's next message.
        ``messages``: instead, a whole conversation in OpenAI's form (roles system, user, assistant,
        tool), which the session then has.
        ``system``: the system message.
        ``tools``: JSON schemas of functions.
        ``template``: other arguments of the chat template. It, tools and the system message last as
        long as the conversation.
        ``overflow``: ``"drop-oldest"`` forgets the oldest turns of a conversation that does not
        fit, never the system message; ``last.dropped`` counts them.

        Raises the errors of ``generate``, and InputError for messages in another form or order, or
        what the template does not read.
        """
        chat = requested(self._chat, prompt, messages, system, tools, template)
        ids, kept = fitting(chat, self._ids, self.engine.geometry.context, overflow, max_tokens)
        before = self._chat if messages is None else None
        turn = Turn(kept, before, len(chat.turns) - len(kept.turns))
        mode = self.mode(speculate)
        request = self._checked(ids, max_tokens, stop, mode, sampling, turn)
        return _pieces(self._runs(request))

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
        """The tokens of a prompt or a whole conversation in this app's chat format.

        Arguments and errors are those of ``chat``.
        """
        return self._ids(requested(Chat(), prompt, messages, system, tools, template))

    def _ids(self, chat: Chat) -> list[int]:
        context = self.engine.geometry.context
        as_text = not self.special_tokens
        return self.tokenizer.chat_ids(chat, self.instruction, context, as_text=as_text)

    def sampling(self, **asked: Any) -> Sampling:
        """``Sampling`` as asked for, and in all else as the model recommends.

        Models do so in ``generation_config.json``.
        """
        recommended = self._bundle.manifest.sampling if self._bundle is not None else None
        return Sampling.sampled(recommended, **asked)

    def compile(self, sampling: Sampling | None) -> None:
        """Compile the structure of ``sampling`` now, so that its next answer need not wait for it.

        Any thread may call this. Raises InputError for a structure that cannot be used.
        """
        if sampling is None or sampling.structure is None:
            return
        if VERIFY_PLAIN in self.engine.functions:
            vocab = self.engine.geometry.vocab
            open_grammar(sampling.structure, self.tokenizer, vocab).close()

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
        continues: bool = False,
    ) -> Generator[Run, None, None]:
        """``generate`` call by call, with tokens and drafts.

        ``prompt``: token ids. ``mode``: ADAPTIVE or one of MODES. ``continues``: the prompt is a
        text that the answer goes on with, not a conversation, which matters to tokenizers that drop
        a text's first space. It is so without being asked for where the model has no chat template,
        and for answers with a structure, which counts every space.
        """
        ids = arguments.wholes("prompt", prompt)
        return self._runs(self._checked(ids, max_tokens, stop, mode, sampling, continues=continues))

    def growing(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        mode: str = SPECULATIVE,
        sampling: Sampling | None = None,
        continues: bool = False,
    ) -> Generator[Generation, None, None]:
        """The answer so far, after each call; the last time it has a reason.

        Arguments are those of ``runs``.
        """
        ids = arguments.wholes("prompt", prompt)
        request = self._checked(ids, max_tokens, stop, mode, sampling, continues=continues)

        def answers() -> Generator[Generation, None, None]:
            with closing(self._runs(request)) as runs:
                for _ in runs:
                    yield request.answer
            if request.answer.reason is Reason.CANCELLED:
                yield request.answer

        return answers()

    def _checked(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop: Sequence[str],
        mode: str,
        sampling: Sampling | None,
        turn: Turn | None = None,
        continues: bool = False,
    ) -> Request:
        """A request to the app in use. Nothing changes before its answer begins."""
        max_tokens = arguments.whole("max_tokens", max_tokens, 1)
        stop = arguments.texts("stop", stop)
        if mode not in (ADAPTIVE, *MODES):
            raise InputError(
                f"no decoding mode {mode!r}; choose one of {', '.join((ADAPTIVE, *MODES))}"
            )
        shared = self._conversation.shared(prompt) if turn is not None else 0
        check_prompt(self.engine.geometry, prompt[shared:], shared)
        structured = sampling is not None and sampling.structure is not None
        continues = continues or structured or self.tokenizer.continues
        return Request(
            conversation=self._conversation,
            prompt=prompt,
            max_tokens=max_tokens,
            mode=mode,
            output=self.tokenizer.output(stop, after=prompt if continues else None),
            chooser=self._chooser(prompt, mode, sampling),
            turn=turn,
            answer=Generation(
                len(prompt),
                dropped=turn.dropped if turn is not None else 0,
                inexact=_is_inexact(mode, sampling),
                continues=continues,
            ),
        )

    def _runs(self, request: Request) -> Generator[Run, None, None]:
        """The answer to a request, call by call, as long as it owns the cache."""
        answer = request.answer
        conversation = request.conversation
        self._begin(request)
        rest = request.prompt[answer.cached_tokens :]
        advance = self._advance(request)
        steps = decode(conversation, rest, advance, request.output.push, request.max_tokens)
        try:
            while answer.reason is None and not conversation.cancelled:
                if self._running is not answer:
                    raise InputError(LOST)
                yield request.called(advance, steps)
        except Cancelled:
            return
        finally:
            self._end(request)

    def _begin(self, request: Request) -> None:
        """Let an answer take the cache.

        Raises InputError if the app or the conversation that it was asked of is another by now.
        """
        conversation = request.conversation
        continued = request.turn.before if request.turn is not None else None
        app_is_another = self._conversation is not conversation
        chat_is_another = continued is not None and continued is not self._chat
        if app_is_another or chat_is_another:
            raise InputError(LOST)
        if continued is None:
            self._chat = Chat()
        self._running = self._last = request.answer
        request.answer.cached_tokens = conversation.shared(request.prompt)
        conversation.length = request.answer.cached_tokens
        conversation.cancelled = False
        conversation.chosen_by(request.chooser)
        conversation.cache.begin(request.answer)

    def _end(self, request: Request) -> None:
        """Give an answer its reason, and the conversation what it said."""
        answer = request.answer
        if request.chooser is not None:
            request.chooser.close()
        if answer.reason is None:
            answer.reason = Reason.CANCELLED
        if request.turn is not None and answer.tokens and self._running is answer:
            self._chat = request.turn.chat.then(ASSISTANT, answer.text)

    def _chooser(
        self, prompt: Sequence[int], mode: str, sampling: Sampling | None
    ) -> Chooser | None:
        """What chooses the tokens of an answer; None: the graph does."""
        if sampling is None or sampling.greedy:
            return None
        if VERIFY_PLAIN not in self.engine.functions:
            raise InputError(
                f"{self.engine.source}: this bundle chooses tokens in its graph, greedily; for "
                "sampling, structures and log-probabilities export it with --choose host"
            )
        if mode == PLAIN_STEP:
            raise InputError(
                f"mode {mode!r} takes the graph's own tokens; with sampling choose 'plain'"
            )
        vocab = self.engine.geometry.vocab
        grammar = None
        if sampling.structure:
            grammar = open_grammar(sampling.structure, self.tokenizer, vocab)
        return Chooser(
            sampling,
            prompt,
            self.tokenizer.stop_ids,
            vocab,
            grammar,
            self.engine.kernels,
            self.engine.source,
        )

    def _advance(self, request: Request) -> Advance:
        if request.mode != ADAPTIVE:
            return MODES[request.mode]
        known = self._adaptive.setdefault(request.conversation, {})
        chooses = request.chooser is not None
        if chooses not in known:
            known[chooses] = Adaptive(Lookup() if self.streams else LookupOnly(self.phrases))
        return known[chooses]


def _is_inexact(mode: str, sampling: Sampling | None) -> bool:
    """Whether drafts may change the answer."""
    if sampling is None or not sampling.typical_acceptance:
        return False
    return mode in (SPECULATIVE, ADAPTIVE)


def _pieces(runs: Generator[Run, None, None]) -> Iterator[str]:
    with closing(runs):
        for run in runs:
            if run.text:
                yield run.text
