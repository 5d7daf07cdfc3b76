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
from ssdevice.text.tools import HERMES_MARKS, ToolStyle, functions_of


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
    functions = functions_of(tools)
    chosen = functions if name is None else {name: functions[name]} if name in functions else {}
    if not chosen:
        raise InputError(f"no tool {name!r}; the request has {', '.join(functions) or 'none'}")
    for number, (found, parameters) in enumerate(chosen.items()):
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
