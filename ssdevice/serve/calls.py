"""Calls of functions in answers: where they may begin, how forced ones are written, and OpenAI's objects of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from ssdevice.runtime.generation import Generation
from ssdevice.serve.request import Request
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tools import Call, ToolStyle, answer_text, parse_calls

NO_STYLE = "calls cannot be read in the form that this model's chat template gives them; tool_choice can force one"
OPENINGS = {
    ToolStyle.HERMES: ("<tool_call>",),
    ToolStyle.LLAMA3: ("<|python_tag|>", "{"),
    ToolStyle.GEMMA: ("<start_function_call>", "<|tool_call>"),
}
"""What a call may begin with: the text from there on is shown once it is known to be none."""


def style_of(tokenizer: ChatTokenizer) -> ToolStyle | None:
    """How the model writes calls; None if it does not, or in a form that is not read."""
    return ToolStyle.of(tokenizer.chat.template)


def forced_style(tokenizer: ChatTokenizer) -> ToolStyle:
    """How a call is written that a request requires: as the model does, otherwise as plain JSON."""
    style = style_of(tokenizer)
    return ToolStyle.LLAMA3 if style in (None, ToolStyle.GEMMA) else style


def calls_in(answer: Generation, request: Request, tokenizer: ChatTokenizer) -> list[Call]:
    """The calls in an answer; none if it calls a function that the request does not have."""
    style = forced_style(tokenizer) if request.forced else style_of(tokenizer)
    if not request.tools or style is None:
        return []
    _, calls = parse_calls(answer_text(tokenizer, answer.tokens), style)
    known = {tool["function"]["name"] for tool in request.tools}
    return calls if all(call.name in known for call in calls) else []


def as_json(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Calls as OpenAI's ``tool_calls``."""
    return [
        {
            "id": f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
