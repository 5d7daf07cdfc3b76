"""Calls of functions in answers: where they may begin, the form that forces one, and OpenAI's objects of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from ssdevice.errors import InputError
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.structure.options import Structure
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
FORCED = {ToolStyle.HERMES: "<tool_call>\n"}
"""What the prompt ends with if the model must write a call; other styles begin with its JSON."""
DEFINITIONS = ("$defs", "definitions")
"""Where schemas keep what they refer to, by paths from the root."""


def style_of(tokenizer: ChatTokenizer) -> ToolStyle | None:
    """How the model writes calls; None if it does not, or in a form that is not read."""
    return ToolStyle.of(tokenizer.chat.template)


def call_structure(functions: Sequence[Mapping[str, Any]], style: ToolStyle | None) -> Structure:
    """A JSON object that calls one of these functions.

    Raises InputError if two of them define different schemas under one name.
    """
    key = "parameters" if style is ToolStyle.LLAMA3 else "arguments"
    root: dict[str, Any] = {"anyOf": []}
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object"})
        for name in DEFINITIONS:
            for defined, schema in parameters.pop(name, {}).items():
                if root.setdefault(name, {}).setdefault(defined, schema) != schema:
                    raise InputError(f"two functions define {defined!r} in their {name}; give it another name")
        if "properties" in parameters:  # small models invent more where a schema does not say that there are none
            parameters.setdefault("additionalProperties", False)
        shape = {"type": "object", "properties": {"name": {"const": function["name"]}, key: parameters}}
        root["anyOf"].append({**shape, "required": ["name", key], "additionalProperties": False})
    return Structure.json_schema(root)


def calls_in(answer: Generation, request: Request, tokenizer: ChatTokenizer) -> list[Call]:
    """The calls in an answer; none if it calls a function that the request does not have."""
    style = style_of(tokenizer)
    if request.forced:
        text, style = f"<tool_call>{answer.text}</tool_call>", ToolStyle.HERMES
    elif request.tools and style is not None:
        text = answer_text(tokenizer, answer.tokens)
    else:
        return []
    _, calls = parse_calls(text, style)
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
