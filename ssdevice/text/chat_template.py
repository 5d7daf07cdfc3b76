"""The chat format of a model: its template, special tokens and stop tokens, and the text of a conversation."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ssdevice.config import read_json
from ssdevice.errors import ConfigError
from ssdevice.text.frames import NO_CONVERSATIONS, NO_PROMPTS, Conversation, Frames, Message, frames_of
from ssdevice.text.renderer import Renderer

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_CONFIG_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
MAX_TEMPLATE_CHARS = 1 << 20


@dataclass(frozen=True)
class ChatFormat:
    """What a bundle keeps of a model's chat format: frames, or a template where frames do not say all.

    ``template``: jinja2 source, None where ``frames`` hold for whole conversations. ``special_tokens``: names such as
    ``bos_token`` and their text, for the template. ``stop_ids``: tokens that end an answer. ``variables``: further
    values for the template, such as ``{"enable_thinking": False}``. ``frames``: beside a template they are for hosts
    without jinja2 and hold for one question.
    """

    template: str | None
    special_tokens: dict[str, str]
    stop_ids: tuple[int, ...]
    variables: dict[str, Any] = field(default_factory=dict)
    frames: Frames | None = None

    def __post_init__(self) -> None:
        if self.template is not None and len(self.template) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the chat template has {len(self.template)} characters, at most {MAX_TEMPLATE_CHARS}")
        if self.template is None and (self.frames is None or self.frames.user is None or self.frames.assistant is None):
            raise ConfigError("the chat format has no template, and no frames of whole conversations")
        for stop in self.stop_ids:
            if type(stop) is not int or stop < 0:
                raise ConfigError(f"stop token id {stop!r} is not a whole number of 0 or more")

    @property
    def writer(self) -> Frames | ChatTemplate:
        """What makes the text of a conversation. Raises ConfigError for a template that is not valid."""
        if self.template is None:
            assert self.frames is not None
            return self.frames
        return ChatTemplate(self)

    @property
    def note(self) -> str | None:
        """What hosts cannot do that do not render templates; None if they can do all."""
        if self.template is None:
            return None
        return NO_PROMPTS if self.frames is None else NO_CONVERSATIONS

    def framed(self) -> ChatFormat:
        """The same format in frames, as far as its template is no more than these."""
        names = json.dumps({**self.special_tokens, **self.variables}, sort_keys=True)
        frames = _frames(self.template, names) if self.template is not None else self.frames
        if frames is None or frames.user is None:
            return replace(self, frames=frames)
        return ChatFormat(None, {}, self.stop_ids, {}, frames)


class ChatTemplate:
    """A chat template, rendered by another process under limits. Raises ConfigError for one that is not valid."""

    def __init__(self, chat: ChatFormat) -> None:
        # Of its own: what a hostile template does to Python must not reach another's prompts.
        self._renderer = Renderer()
        # At exit the system ends it, since its input ends: another thread may still be waiting for it.
        weakref.finalize(self, self._renderer.close).atexit = False
        self._template = chat.template
        self._names = {**chat.special_tokens, **chat.variables}
        self.constants: list[str] = self._ask(None)["constants"]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation; raises ConfigError with the reason if the template refuses it."""
        ((text, reason),) = self._ask([(messages, add_generation_prompt)])["texts"]
        if text is None:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses a conversation of {roles}: {reason}")
        return str(text)

    def render_all(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """The texts of several conversations, None for those that the template refuses."""
        return [text for text, _ in self._ask(conversations)["texts"]]

    def _ask(self, conversations: Sequence[Conversation] | None) -> Any:
        given = None if conversations is None else [([*map(dict, said)], opened) for said, opened in conversations]
        answer = self._renderer.ask({"template": self._template, "names": self._names, "conversations": given})
        if "invalid" in answer:
            raise ConfigError(f"the chat template cannot be used: {answer['invalid']}")
        return answer


@functools.lru_cache(maxsize=64)  # an export opens the same folder several times
def _frames(template: str, names: str) -> Frames | None:
    rendered = ChatTemplate(ChatFormat(template, {}, (), json.loads(names)))
    return frames_of(template, rendered.constants, rendered.render_all)


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """``eos_token_id`` of ``generation_config.json``, else of ``config.json``; empty if neither names one."""
    generation = read_object(folder / GENERATION_CONFIG_FILE)
    config = read_object(folder / CONFIG_FILE)
    text_config = config.get("text_config")
    for file, entries in (
        (GENERATION_CONFIG_FILE, generation),
        (CONFIG_FILE, config),
        (CONFIG_FILE, text_config if isinstance(text_config, dict) else {}),
    ):
        ids = entries.get("eos_token_id")
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
