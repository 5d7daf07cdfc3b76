"""The prompt format of a model without a chat template: the prompt as it is, as its tokenizer encodes any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ssdevice.errors import ConfigError
from ssdevice.text.chat_template import TEMPLATE_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NOTE = "the model has no chat template: a prompt is given to it as it is, after an app's instruction"
PROBE = "probe"
# Every message on a line of its own, but an answer directly behind its prompt: the model goes on with the text.
_MESSAGES = (
    "{% for message in messages %}{% if not loop.first and message['role'] != 'assistant' %}{{ '\\n' }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)
# Tokenizers that begin a text with a space do so only at its very beginning, which a special token takes from them.
_SPACE = "{{ '' if messages[0]['content'].startswith(' ') else ' ' }}"


def plain_template(tokenizer: Tokenizer, folder: Path) -> str:
    """A template for prompts without marks: it gives the ids that the tokenizer itself gives a text.

    Special tokens that the tokenizer puts before a text (mostly ``bos_token``) are in the template. Those that it puts
    behind are not: the model is to go on there. Raises ConfigError if no template gives these ids.
    """
    whole = tokenizer.encode(PROBE)
    words = [i for i, special in enumerate(whole.special_tokens_mask) if not special] or [0]
    opening = "".join(whole.tokens[: words[0]])
    for space in ("", " "):
        ids = tokenizer.encode(f"{opening}{space}{PROBE}", add_special_tokens=False).ids
        if ids and ids == whole.ids[: words[-1] + 1]:
            before = "{{ " + json.dumps(opening, ensure_ascii=False) + " }}" if opening else ""
            return before + (_SPACE if space else "") + _MESSAGES
    raise ConfigError(
        f"{folder}: no chat template, and none can be made that begins a prompt as its tokenizer does; write the "
        f"model's prompt format, as jinja2, to {folder / TEMPLATE_FILE}"
    )
