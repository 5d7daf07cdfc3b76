"""The chat format of a model: its template, special tokens and stop tokens, and the text of a
conversation.
"""

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ssdevice.config import read_json
from ssdevice.errors import ConfigError, InputError, TemplateRefusal
from ssdevice.text.frames import (
    NO_CONVERSATIONS,
    NO_PROMPTS,
    Conversation,
    Doubt,
    Frame,
    Frames,
    Message,
    Trim,
    frames_of,
)
from ssdevice.text.marks import Outside, as_it_is
from ssdevice.text.messages import CALLS, arguments_object, arguments_text, with_arguments
from ssdevice.text.renderer import Renderer

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_CONFIG_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
MAX_TEMPLATE_CHARS = 1 << 20
PLAIN_PROMPT = (
    "the model has no chat template: a prompt is given to it as it is, after an app's instruction"
)
PROBE = "probe"
PROBE_ARGUMENTS = {f"{PROBE}-of-arguments": f"{PROBE}-of-a-value"}
OWN_NAMES = ("messages", "add_generation_prompt")
"""What every template is given."""
OF_TOOLS = {"tool_calls", "reasoning_content"}
"""Keys of messages that are refused unless the template reads them."""
NAME = "name"
"""A key of messages that is left out unless the template reads it, as transformers does."""


@dataclass(frozen=True)
class ChatFormat:
    """What a bundle keeps of a model's chat format: frames, and a template where frames do not say
    all.

    ``template``: jinja2 source; None if ``frames`` are all of it. ``special_tokens``: names such as
    ``bos_token`` and their text, for the template. ``stop_ids``: tokens that end an answer.
    ``variables``: further values for the template, such as ``{"enable_thinking": False}``.
    ``frames``: of whole conversations or, beside a template, of one question, for hosts without
    jinja2. ``tool_template``: another template, for conversations with tools (transformers'
    ``tool_use``); None: the one template is for all.
    """

    template: str | None
    special_tokens: dict[str, str]
    stop_ids: tuple[int, ...]
    variables: dict[str, Any] = field(default_factory=dict)
    frames: Frames | None = None
    tool_template: str | None = None

    def __post_init__(self) -> None:
        for template in (self.template, self.tool_template):
            if template is not None and len(template) > MAX_TEMPLATE_CHARS:
                raise ConfigError(
                    f"the chat template has {len(template)} characters, at most "
                    f"{MAX_TEMPLATE_CHARS} are allowed"
                )
        if self.template is None and not self.whole:
            raise ConfigError(
                "the chat format has no template, and no frames of whole conversations"
            )
        for stop in self.stop_ids:
            if type(stop) is not int or stop < 0:
                raise ConfigError(f"stop token id {stop!r} is not a whole number of 0 or more")

    @property
    def whole(self) -> bool:
        """Whether the frames hold for conversations, not only for one question."""
        return self.frames is not None and None not in (self.frames.user, self.frames.assistant)

    @property
    def writer(self) -> "Frames | ChatTemplate":
        """What makes the text of a conversation.

        Raises ConfigError for a template that is not valid.
        """
        return self.frames if self.frames is not None and self.whole else ChatTemplate(self)

    @property
    def for_tools(self) -> str | None:
        """The template of conversations with tools; None if no template is kept."""
        return self.template if self.tool_template is None else self.tool_template

    @property
    def of_tools(self) -> "ChatFormat":
        """The format of conversations with tools: its own template, and no frames."""
        return replace(self, template=self.for_tools, frames=None, tool_template=None)

    @property
    def note(self) -> str | None:
        """What hosts cannot do that do not render templates; None if they can do all."""
        if self.whole:
            return None
        return NO_PROMPTS if self.frames is None else NO_CONVERSATIONS

    def framed(self) -> "ChatFormat":
        """The same format in frames, and without the template if it is no more than these."""
        if self.template is None:
            return self
        names = json.dumps({**self.special_tokens, **self.variables}, sort_keys=True)
        frames, reads = _frames(self.template, names)
        found = replace(self, frames=frames)
        if not found.whole or reads:
            return found
        if self.tool_template is not None:
            return replace(found, template=None)
        return ChatFormat(None, {}, self.stop_ids, {}, frames)


class ChatTemplate:
    """A chat template, rendered by another process under limits.

    Raises ConfigError for one that is not valid.
    """

    def __init__(self, chat: ChatFormat) -> None:
        # Of its own: what a hostile template does to Python must not reach another's prompts.
        self._renderer = Renderer()
        # At exit the system ends it, since its input ends: another thread may still be waiting for
        # it.
        weakref.finalize(self, self._renderer.close).atexit = False
        self._template = chat.template
        self._names = {**chat.special_tokens, **chat.variables}
        read = self._ask(None)
        self.constants: list[str] = read["constants"]
        self.names = {
            name for name in read["names"] if name not in OWN_NAMES and not name.endswith("_token")
        }
        """What it may be given besides messages and special tokens."""
        self.keys = (OF_TOOLS | {NAME}) & {*self.constants, *read["members"]}
        """What it reads of messages beyond roles and contents."""
        self._joins: bool | None = None
        """Whether it writes arguments of calls as Python does where it gets objects."""
        self.doubts = [Doubt(*doubt) for doubt in read["doubts"]]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        values: Mapping[str, Any] | None = None,
        outside: Outside = as_it_is,
    ) -> str:
        """The text of a conversation; ``values``: of ``names``.

        ``outside``: what becomes of arguments of calls before they are written (``marks``). Raises
        TemplateRefusal, InputError for other names.
        """
        needed = {key for message in messages for key in message if key in OF_TOOLS} - self.keys
        for name in sorted(needed | ({*(values or {})} - self.names)):
            reads = ", ".join(sorted(self.names | self.keys)) or "roles and contents"
            raise InputError(
                f"the model's chat template does not read {name[:60]!r}; it reads {reads}"
            )
        text, reason = self._written(messages, add_generation_prompt, values, outside)
        if text is None:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateRefusal(f"the chat template refuses a conversation of {roles}: {reason}")
        return text

    def _written(
        self,
        messages: Sequence[Message],
        opened: bool,
        values: Mapping[str, Any] | None,
        outside: Outside,
    ) -> tuple[str | None, str]:
        """The text of a conversation, or None and why it is refused.

        Most templates write the arguments of calls as JSON and take objects; some join them to
        other texts, and take the JSON itself. Objects are given first. A template that joins them
        either refuses, or writes them as Python does.
        """

        def given(form: Callable[[Any], Any]) -> tuple[str | None, str]:
            said = [with_arguments(message, form) for message in messages]
            ((text, reason),) = self._ask([(said, opened)], values)["texts"]
            return text, reason

        text, reason = given(lambda each: outside(arguments_object(each)))
        if not any(CALLS in message for message in messages):
            return text, reason
        if text is not None:
            if self._joins is None:
                self._joins = _as_python(given(lambda _: PROBE_ARGUMENTS)[0])
            if not self._joins:
                return text, reason
        joined, _ = given(lambda each: outside(arguments_text(each)))
        return (text, reason) if joined is None else (joined, "")

    def render_all(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """The texts of several conversations, None for those that the template refuses."""
        return [text for text, _ in self._ask(conversations)["texts"]]

    def _ask(
        self, conversations: Sequence[Conversation] | None, values: Mapping[str, Any] | None = None
    ) -> Any:
        given = (
            None
            if conversations is None
            else [([*map(dict, said)], opened) for said, opened in conversations]
        )
        names = {**self._names, **(values or {})}
        answer = self._renderer.ask(
            {"template": self._template, "names": names, "conversations": given}
        )
        if "invalid" in answer:
            raise ConfigError(f"the chat template cannot be used: {answer['invalid']}")
        return answer


def _as_python(text: str | None) -> bool:
    """Whether a text has the probe's arguments as Python writes a dict, which is no JSON."""
    return text is not None and str(PROBE_ARGUMENTS) in text


@functools.lru_cache(maxsize=64)  # an export opens the same folder several times
def _frames(template: str, names: str) -> tuple[Frames | None, bool]:
    """The frames of a template, and whether it reads more than they are given."""
    rendered = ChatTemplate(ChatFormat(template, {}, (), json.loads(names)))
    frames = frames_of(template, rendered.constants, rendered.render_all, rendered.doubts)
    return frames, bool(rendered.names or rendered.keys)


def plain_frames(tokenizer: Tokenizer, folder: Path) -> Frames:
    """Frames for prompts without marks, which have the ids that the tokenizer itself gives a text.

    Every message is on its own line, but an answer follows its prompt directly: the model continues
    the text. Special tokens that the tokenizer puts before a text are in the frames, those behind
    are not. Raises ConfigError if no frames give these ids.
    """
    whole = tokenizer.encode(PROBE)
    words = [i for i, special in enumerate(whole.special_tokens_mask) if not special] or [0]
    opening = "".join(whole.tokens[: words[0]])
    # Tokenizers that begin a text with a space do so only at its very beginning, which a special
    # token takes from them.
    for space, trim in (("", Trim.NONE), (" ", Trim.SPACE)):
        ids = tokenizer.encode(f"{opening}{space}{PROBE}", add_special_tokens=False).ids
        if ids and ids == whole.ids[: words[-1] + 1]:
            first = Frame(opening + space, "", trim)
            line = Frame("\n", "")
            return Frames(
                first,
                system=first,
                after_system=line,
                user=line,
                assistant=Frame("", ""),
                answer="",
            )
    raise ConfigError(
        f"{folder}: no chat template, and none can be made that begins a prompt as its tokenizer "
        f"does; write the model's prompt format, as jinja2, to {folder / TEMPLATE_FILE}"
    )


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """``eos_token_id`` of ``generation_config.json``, else of ``config.json``; empty if neither
    names one.
    """
    generation, config = (
        read_object(folder / file) for file in (GENERATION_CONFIG_FILE, CONFIG_FILE)
    )
    inner = config.get("text_config")
    for file, entries in (
        (GENERATION_CONFIG_FILE, generation),
        (CONFIG_FILE, config),
        (CONFIG_FILE, inner),
    ):
        ids = entries.get("eos_token_id") if isinstance(entries, dict) else None
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ConfigError(f"{folder / file}: 'eos_token_id' is {ids!r}, expected token ids")
            return tuple(ids)
    return ()


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file, or ``{}`` if there is no such file; raises ConfigError."""
    if not file.exists():
        return {}
    value = read_json(file)
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
