"""What a client is given for an answer that is known: requests and replies without a model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken

from ssdevice.runtime.generation import Generation, Reason
from ssdevice.serve.reply import Reply
from ssdevice.serve.request import Request, chat_request
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer, load_tokenizer
from tests.runtime.sampling.letters import letters
from tests.serve.serving import TEMPLATE, USER

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FENCE = "```"
TEMPLATES = {
    "Hermes": TEMPLATE,
    "Llama": TEMPLATE.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", ""),
    "XML": TEMPLATE.replace("<tool_call>", "<tool_call><function=f>"),
}


@cache
def tokenizer(template: str, special: bool | None) -> ChatTokenizer:
    """``special``: whether the added tokens for marks are; None for a tokenizer without them."""
    made = load_tokenizer(letters().tokenizer_json, "letters")
    if special is not None:
        made.add_tokens([AddedToken(mark, special=special) for mark in MARKS])
    made.add_tokens([AddedToken(FENCE, special=False)])
    chat = ChatFormat(TEMPLATES[template], {"eos_token": "</s>"}, letters().stop_ids)
    return ChatTokenizer(made, chat)


def requested(tools: list[dict[str, Any]], choice: Any = "auto", **more: Any) -> Request:
    body = {"model": "m", "messages": [USER], "tools": tools, "tool_choice": choice, **more}
    return chat_request(json.dumps(body).encode())


def given(
    request: Request, tokenizer: ChatTokenizer, tokens: list[int], thinking: bool = False
) -> dict[str, Any]:
    """The message that a client is given; a stream's is put together from its pieces.

    ``thinking``: whether the prompt ended with ``<think>``.
    """

    def answered(end: int) -> Generation:
        part = tokens[:end]
        reason = Reason.STOP if end == len(tokens) else None
        text = tokenizer.decode(part)
        return Generation(1, text=text, tokens=part, reason=reason, thinking=thinking)

    reply = Reply(request, tokenizer, "fp")
    if not request.stream:
        return dict(reply.whole(answered(len(tokens)))["choices"][0]["message"])
    text = ""
    calls = []
    for end in (*range(1, len(tokens), 7), len(tokens)):
        for piece in reply.pieces(answered(end)):
            delta = piece["choices"][0]["delta"]
            text += delta.get("content") or ""
            calls += delta.get("tool_calls", [])
    return {"content": text or None, "tool_calls": calls}
