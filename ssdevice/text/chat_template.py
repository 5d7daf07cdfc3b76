"""The chat format of a model: its template, special tokens and stop tokens, and the text of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssdevice.config import read_json
from ssdevice.errors import ConfigError
from ssdevice.text import chat_bounds

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_CONFIG_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
MAX_TEMPLATE_CHARS = 1 << 20

Message = Mapping[str, str]


@dataclass(frozen=True)
class ChatFormat:
    """What a bundle keeps of a model's chat format.

    ``template``: jinja2 source. ``special_tokens``: names such as ``bos_token`` and their text. ``stop_ids``: tokens
    that end an answer. ``variables``: further values for the template, such as ``{"enable_thinking": False}``.
    """

    template: str
    special_tokens: dict[str, str]
    stop_ids: tuple[int, ...]
    variables: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.template) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the chat template has {len(self.template)} characters, at most {MAX_TEMPLATE_CHARS}")
        for stop in self.stop_ids:
            if type(stop) is not int or stop < 0:
                raise ConfigError(f"stop token id {stop!r} is not a whole number of 0 or more")


class ChatTemplate:
    """A compiled chat template. Raises ConfigError if its source cannot be compiled."""

    def __init__(self, chat: ChatFormat) -> None:
        import jinja2

        from ssdevice.text.chat_environment import environment

        try:
            self._template = environment().from_string(chat.template)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(f"the chat template is not valid jinja2: {error}{line}") from error
        self._names = {**chat.special_tokens, **chat.variables}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation; raises ConfigError with the reason if the template refuses it."""
        import jinja2

        names = {
            "tools": None,
            "documents": None,
            **self._names,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with chat_bounds.budget():
                return self._render(names)
        except (
            jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
            ValueError,
        ) as error:  # fmt: skip  # what a template's own expressions can raise
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def _render(self, names: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(names):
            size += len(piece)
            chat_bounds.check_size(size)
            pieces.append(piece)
        return "".join(pieces)


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
