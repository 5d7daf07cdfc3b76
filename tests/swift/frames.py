"""Prompt frames of chat templates, with the prompts that jinja2 renders from these templates."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ssdevice.config import to_json
from ssdevice.errors import ConfigError
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
from ssdevice.text.tokenizer import user_content
from tests.text.families import ONE_QUESTION, WHOLE

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = (
    "hi",
    " \t both\r\n",
    "\n\nlines\n\nand",
    "\u2003odd\u00a0\x1c\x85",
    "  two",
    "e\u0301 \u00e9 🙂",
)
SYSTEMS = (None, "", "Be brief.", " \nBe brief. ")


def record() -> dict[str, Any]:
    """Every template with one to three turns, with and without a system message and an app's
    instruction.
    """
    cases = []
    for template in (*WHOLE.values(), *ONE_QUESTION.values()):
        chat = ChatFormat(template, NAMES, (1,))
        frames = to_json(chat.framed().frames)
        written = ChatTemplate(chat)
        for messages in _conversations(1 if template in ONE_QUESTION.values() else 3):
            text = None
            with suppress(ConfigError):
                text = written.render(messages, add_generation_prompt=True)
            cases.append(
                {"template": template, "frames": frames, "messages": messages, "text": text}
            )
    return {"cases": cases}


def _conversations(turns: int) -> list[list[dict[str, str]]]:
    found = []
    for system in SYSTEMS:
        start = [] if system is None else [{"role": "system", "content": system}]
        for at, text in enumerate(TEXTS):
            said = [
                user_content("Be\nbrief." if at % 2 else "", text),
                "",
                TEXTS[at - 1],
                text,
                TEXTS[at - 2],
            ]
            talk = [
                {"role": ("user", "assistant")[i % 2], "content": content}
                for i, content in enumerate(said)
            ]
            found += [[*start, *talk[: 2 * turn + 1]] for turn in range(turns)]
    return found
