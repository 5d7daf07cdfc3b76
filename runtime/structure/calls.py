"""A structure whose answers are calls of functions: what ``tool_choice: required`` asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ssdevice.errors import InputError
from ssdevice.runtime.structure.grammar import SPACING
from ssdevice.runtime.structure.options import Structure
from ssdevice.text.stream import special_ids
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tools import HERMES_MARKS, ToolStyle

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_structure(
    tools: Sequence[Mapping[str, Any]], style: ToolStyle, tokenizer: ChatTokenizer, name: str | None = None
) -> Structure:
    """One call of one of the ``tools`` (OpenAI's form, see ``tool_of``) in a family's style; ``name``: of this one.

    Raises InputError for tools that have no such form, for an unknown name, and for Gemma's style, which is no JSON.
    """
    if style is ToolStyle.GEMMA:
        raise InputError("a call cannot be required from this family: it does not write calls in JSON")
    key = "parameters" if style is ToolStyle.LLAMA3 else "arguments"
    rules = []
    for number, (found, parameters) in enumerate(_functions(tools, name)):
        # Small models invent more arguments where a schema does not say that there are none.
        closed = {"additionalProperties": False} if "properties" in parameters else {}
        schema = json.dumps({**closed, **parameters, "x-guidance": SPACING})
        opening = json.dumps(f'{{"name": {json.dumps(found)}, "{key}": ')
        rules.append(f'call{number}: {opening} values{number} "}}"\nvalues{number}: %json {schema}')
    start = " | ".join(f"call{number}" for number in range(len(rules)))
    if style is ToolStyle.HERMES:
        special = {tokenizer.tokenizer.id_to_token(i) for i in special_ids(tokenizer.tokenizer)}
        # A special token is not its text, and written without quotes.
        first, last = (mark if mark in special else json.dumps(mark) for mark in HERMES_MARKS)
        start = f'{first} "\\n" ({start}) "\\n" {last}'
    return Structure.lark("\n".join([f"start: {start}", *rules]))


def _functions(tools: Sequence[Mapping[str, Any]], name: str | None) -> list[tuple[str, Mapping[str, Any]]]:
    """Names and schemas of the functions that may be called."""
    functions = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        found = function.get("name") if isinstance(function, Mapping) else None
        parameters = function.get("parameters", NO_PARAMETERS) if isinstance(function, Mapping) else None
        if not isinstance(found, str) or not isinstance(parameters, Mapping):
            raise InputError(f"tool {str(tool)[:60]} has no function with a name, and parameters as a JSON schema")
        functions.append((found, parameters))
    chosen = [each for each in functions if name in (None, each[0])]
    if not chosen:
        raise InputError(f"no tool {name!r}; the request has {', '.join(each for each, _ in functions) or 'none'}")
    return chosen
