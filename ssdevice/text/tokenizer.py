"""Text to tokens and back: prompts through the chat template, and an answer as text that never
changes again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from ssdevice.data import Example
from ssdevice.errors import ConfigError, ContextOverflowError, InputError
from ssdevice.text.chat_template import (
    NAME,
    PROBE,
    TOKENIZER_CONFIG_FILE,
    ChatFormat,
    ChatTemplate,
    plain_frames,
)
from ssdevice.text.frames import Frames, Message
from ssdevice.text.marks import Marks, Outside, as_it_is
from ssdevice.text.messages import TOOL, Chat, with_outside
from ssdevice.text.stream import StopStrings, TextOutput, TextStream, TokenTexts, special_ids
from ssdevice.text.tokenizer_limits import check_growth, check_ids, check_sizes, tokenizer_errors

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_ROLE = "tokenizer"
"""In a bundle."""
WRITTEN = {"role", "content"}
"""What frames write of a message."""
NO_TEMPLATE = (
    "the model's chat template writes no more than roles and contents, so there are no tools and "
    "no template arguments (a bundle of an older version: export it again)"
)
MAX_TOKEN_CHARS = 64
"""More than the tokens of any text have on average."""
PROMPT: tuple[Message, ...] = ({"role": "user", "content": PROBE},)


@dataclass(frozen=True)
class Sample:
    """Token ids of one example, prompt first, and how many are the prompt's."""

    ids: tuple[int, ...]
    prompt: int


def user_content(instruction: str | None, prompt: str) -> str:
    """The content of the user's message: the app's instruction on a line of its own, then the
    prompt.
    """
    return f"{instruction}\n{prompt}" if instruction else prompt


def check_instruction(tokenizer: "ChatTokenizer", app: str, instruction: str, context: int) -> None:
    """Raise InputError for an app whose shortest prompt leaves no room for an answer in the
    context.
    """
    ids = tokenizer.prompt_ids(PROBE, instruction=instruction)
    if len(ids) < context:
        return
    if instruction:
        raise InputError(
            f"the instruction of app {app!r} and the chat template take {len(ids)} tokens, which "
            f"leaves no room for an answer in a context of {context}: export with a larger "
            f"--context, or train the app with a shorter --instruction"
        )
    raise InputError(
        f"the chat template takes {len(ids)} tokens, which leaves no room for an answer in a "
        f"context of {context}: export with a larger --context"
    )


class ChatTokenizer:
    """A tokenizer and a chat format: the same ids as ``transformers``' ``apply_chat_template``,
    without transformers.

    ``chat``: the format as a bundle keeps it. ``plain``: whether prompts are used as they are, for
    want of a chat template. Special tokens written out in a prompt are read as such, as
    transformers does, unless ``chat_ids`` is asked for text. Raises ConfigError for a format
    without stop tokens or with a template that does not work.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, *, plain: bool = False) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.plain = plain
        if not chat.stop_ids:
            raise ConfigError(
                f"the chat format has no stop token: set 'eos_token_id' in generation_config.json, "
                f"or 'eos_token' in {TOKENIZER_CONFIG_FILE}"
            )
        self._template = chat.writer
        self.texts = TokenTexts(tokenizer)

    @classmethod
    def of_model(
        cls,
        tokenizer_json: bytes,
        folder: Path,
        template: str | None,
        special: dict[str, str],
        stops: Sequence[int],
        tool_template: str | None = None,
    ) -> Self:
        """The tokenizer of a model in ``folder`` with its chat template (None: prompts are used as
        they are), and that for conversations with tools, if it is another one.

        The special token that the template puts after an answer ends answers, as ``stops`` do.
        """
        tokenizer = load_tokenizer(tokenizer_json, str(folder / TOKENIZER_FILE))
        ends = tuple(dict.fromkeys(stops))
        if template is None:
            chat = ChatFormat(None, {}, ends, {}, plain_frames(tokenizer, folder))
        else:
            chat = ChatFormat(template, special, ends, tool_template=tool_template).framed()
        # A model that was taught this template ends its answers with what the template puts there.
        if (
            end := _first_special(tokenizer, _closing_of(chat.writer))
        ) is not None and end not in stops:
            chat = replace(chat, stop_ids=(*chat.stop_ids, end))
        return cls(tokenizer, chat, plain=template is None)

    @classmethod
    def from_bytes(cls, tokenizer_json: bytes, chat: ChatFormat) -> Self:
        """The tokenizer of a bundle: its ``tokenizer.json`` and the stored chat format."""
        return cls(load_tokenizer(tokenizer_json, TOKENIZER_FILE), chat)

    @property
    def tokenizer_json(self) -> bytes:
        """The tokenizer as ``from_bytes`` reads it.

        Raises ConfigError for ids of more than 24 bits.
        """
        check_ids(self.tokenizer)
        return self.tokenizer.to_str().encode("utf-8")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.chat.stop_ids

    def prompt_ids(
        self,
        prompt: str,
        *,
        instruction: str | None = None,
        system: str | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Ids up to where the model's answer begins.

        ``instruction``: the app's line before the prompt; ``system``: a system message; ``most``:
        as in ``encode``. Raises InputError for an empty prompt or text that is not Unicode,
        ConfigError if the template refuses.
        """
        return self.chat_ids(Chat().instructed(system).asked(prompt), instruction, most)

    def chat_ids(
        self,
        chat: Chat,
        instruction: str | None = None,
        most: int | None = None,
        *,
        as_text: bool = False,
    ) -> list[int]:
        """Ids of a conversation up to where the next answer begins; ``most`` and errors as in
        ``prompt_ids``.

        ``as_text``: special tokens that are written in the conversation are text, and only those of
        the template and of the app's ``instruction`` are tokens; see ``marks``. Raises InputError
        for tools or template arguments that the template does not read.
        """
        if not as_text:
            return self.encode(self.chat_text(chat, instruction), most)

        def render(outside: Outside) -> str:
            text = self.chat_text(chat, instruction, outside)
            self._check_length(text, most)
            return text

        with self._encoding():
            return self._marks.ids(render)

    def chat_text(
        self, chat: Chat, instruction: str | None = None, outside: Outside = as_it_is
    ) -> str:
        """The text of a conversation, with an app's instruction before each message of the user.

        ``outside``: what becomes of values that are neither the template's nor the app's.
        """
        messages = [with_outside(message, outside) for message in chat.messages]
        for at in chat.turns:
            content = user_content(instruction, messages[at]["content"])
            messages[at] = {**messages[at], "content": content}
        values = {name: outside(value) for name, value in chat.template.items()}
        if chat.tools:
            values["tools"] = outside(list(chat.tools))
        # A template that reads a name was kept.
        written = WRITTEN if self.chat.template else WRITTEN | {NAME}
        if values or any(
            message["role"] == TOOL or message.keys() - written for message in messages
        ):
            template = self._for_tools if chat.tools else self._full
            return template.render(
                messages, add_generation_prompt=True, values=values, outside=outside
            )
        return self._template.render(messages, add_generation_prompt=True)

    def sample(self, example: Example, instruction: str | None) -> Sample:
        """The ids of an example and of its completion, if any; errors as in ``prompt_ids``."""
        prompt = self.prompt_ids(example.prompt, instruction=instruction, system=example.system)
        answer = self.completion_ids(example.completion) if example.completion is not None else ()
        return Sample((*prompt, *answer), len(prompt))

    def completion_ids(self, text: str) -> list[int]:
        """Ids that the model should answer with: ``text`` as the template writes it, up to and with
        a stop token.

        What the template puts after the stop token (often a line break) is left out. Without a stop
        token there, the first of ``stop_ids`` is appended.
        """
        head, head_ids = self._head
        whole = self._template.render(
            [*PROMPT, {"role": "assistant", "content": text}], add_generation_prompt=False
        )
        # Some templates open the answer differently when it is still to come (a reasoning mark, for
        # one).
        tail = whole[len(head) :] if whole.startswith(head) else text + self._closing
        whole_ids = self.encode(head + tail)
        # Encoded after the head, so that a tokenizer which begins every text with a space does not
        # do so here.
        ids = (
            whole_ids[len(head_ids) :]
            if whole_ids[: len(head_ids)] == head_ids
            else self.encode(tail)
        )
        if not any(i in self.stop_ids for i in self.encode(self._closing)):
            return [*ids, self.stop_ids[0]]
        while ids[-1] not in self.stop_ids:
            ids.pop()
        return ids

    def user_opening(self, instruction: str | None = None) -> tuple[list[int], int]:
        """Ids up to where the user's words begin (after an app's ``instruction``), and the token
        that ends them.

        Raises ConfigError for a template that does not end a user's turn with a special token.
        """
        messages = [{"role": "user", "content": user_content(instruction, PROBE)}]
        text = self._template.render(messages, add_generation_prompt=False)
        opening, found, closing = text.rpartition(PROBE)
        end = _first_special(self.tokenizer, closing) if found else None
        if end is None:
            raise ConfigError(
                "the chat template does not end a user's turn with a special token, so the model "
                "cannot write prompts (--self-prompt); give --data with --self-distill instead"
            )
        return self.encode(opening), end

    @cached_property
    def _full(self) -> ChatTemplate:
        """The template itself, for what frames do not write."""
        if isinstance(self._template, ChatTemplate):
            return self._template
        if self.chat.template is None:
            raise InputError(NO_TEMPLATE)
        return ChatTemplate(self.chat)

    @cached_property
    def _for_tools(self) -> ChatTemplate:
        """The template of conversations with tools."""
        return self._full if self.chat.tool_template is None else ChatTemplate(self.chat.of_tools)

    @cached_property
    def _marks(self) -> Marks:
        return Marks(self.tokenizer)

    @cached_property
    def _head(self) -> tuple[str, list[int]]:
        head = self._template.render(PROMPT, add_generation_prompt=True)
        return head, self.encode(head)

    @cached_property
    def _closing(self) -> str:
        return _closing_of(self._template)

    def encode(self, text: str, most: int | None = None, special: bool = False) -> list[int]:
        """Ids of a text; raises InputError for half a character.

        ``special``: with the tokens that the tokenizer adds to a text without a template. ``most``:
        how many tokens fit. A text that must have more raises ContextOverflowError unread: tokens
        take many times the memory of a text.
        """
        self._check_length(text, most)
        with self._encoding():
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def _check_length(self, text: str, most: int | None) -> None:
        if most is not None and len(text) > (most + 64) * MAX_TOKEN_CHARS:
            raise ContextOverflowError(
                f"the prompt has {len(text)} characters, far more than the {most} tokens of the "
                f"context; shorten it"
            )

    @staticmethod
    @contextmanager
    def _encoding() -> Iterator[None]:
        """In this context the library's errors are InputErrors."""
        with tokenizer_errors("the tokenizer cannot encode the prompt"):
            try:
                yield
            except (UnicodeEncodeError, TypeError) as error:
                raise InputError(
                    f"text that is not valid Unicode cannot be encoded: {error}"
                ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        with tokenizer_errors("the tokenizer cannot decode the answer"):
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def continues(self) -> bool:
        """Whether answers continue the text of their prompt: no template is between them."""
        frames = self.chat.frames
        if self.chat.template is not None or frames is None:
            return False
        return not frames.answer and not frames.first.after

    def stream(self, after: Sequence[int] | None = None) -> TextStream:
        """The text of further ids; ``after``: the tokens that it continues (``TextStream``)."""
        return TextStream(self.texts, after)

    def output(self, stops: Sequence[str] = (), after: Sequence[int] | None = None) -> TextOutput:
        """A new TextOutput that ends at ``stop_ids`` and at the strings ``stops``; ``after`` as in
        ``stream``.
        """
        return TextOutput(self.stream(after), self.stop_ids, StopStrings(stops))


def _closing_of(template: Frames | ChatTemplate) -> str:
    """What the template puts after an answer."""
    answer = "an answer to be found again"
    text = template.render(
        [*PROMPT, {"role": "assistant", "content": answer}], add_generation_prompt=False
    )
    _, found, closing = text.rpartition(answer)
    if not found:
        raise ConfigError(
            "the chat template does not write the assistant's message; it cannot be used for "
            "training"
        )
    return closing


def _first_special(tokenizer: Tokenizer, text: str) -> int | None:
    """The id that ``text`` begins with if that is a special token."""
    ids = tokenizer.encode(text.lstrip(), add_special_tokens=False).ids
    return ids[0] if ids and ids[0] in special_ids(tokenizer) else None


def load_tokenizer(content: bytes, where: str) -> Tokenizer:
    """The content of a ``tokenizer.json``, without truncation and padding; raises ConfigError."""
    check_sizes(content, where)
    with tokenizer_errors(
        f"{where}: not a tokenizer this version of tokenizers can read", ConfigError
    ):
        tokenizer = Tokenizer.from_buffer(content)
    check_growth(tokenizer, where)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
