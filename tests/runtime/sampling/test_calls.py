"""Calls that are required: whatever the model would say, one of the tools is called with arguments
of its schema.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from ssdevice.errors import InputError
from ssdevice.runtime.sampling.structure import call_structure, open_grammar
from ssdevice.text.tools import ToolStyle, answer_text, parse_calls, tool_of
from tests.runtime.sampling.letters import letters

VOCAB = letters().tokenizer.get_vocab_size()


def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2] = 1) -> None: ...


def time() -> None: ...


NESTED = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"in": {"$ref": "#/$defs/place"}},
            "required": ["in"],
            "$defs": {"place": {"enum": ['"here"', "there"]}},
            "additionalProperties": False,
        },
    },
}
TOOLS: list[dict[str, Any]] = [
    tool_of(weather),
    tool_of(time),
    NESTED,
    {"function": {"name": "no parameters"}},
]


@pytest.mark.parametrize("style", [ToolStyle.HERMES, ToolStyle.LLAMA3])
def test_every_answer_is_a_valid_call(style: ToolStyle) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    draw = np.random.default_rng(0)
    called = set()
    for _ in range(60):
        grammar = open_grammar(call_structure(TOOLS, style, letters()), letters(), VOCAB)
        ids = list[int]()
        while not ids or ids[-1] not in letters().stop_ids:
            ids.append(int(np.argmax(grammar.masked(draw.normal(size=VOCAB).astype(np.float32)))))
            grammar.accept(ids[-1])
        content, (call,) = parse_calls(answer_text(letters(), ids), style)
        assert content == "" and Draft202012Validator(schemas[call.name]).is_valid(call.arguments)
        called.add((call.name, *map(str, call.arguments.values())))
    assert {name for name, *_ in called} == set(schemas)
    assert ("find", '"here"') in called


def test_a_named_tool_is_the_only_one() -> None:
    grammar = open_grammar(
        call_structure([tool_of(time)], ToolStyle.LLAMA3, letters()), letters(), VOCAB
    )
    assert answer_text(letters(), grammar.forced) == '{"name": "time", "parameters": {}}'


def test_a_special_mark_is_its_token() -> None:
    from tokenizers import AddedToken

    from ssdevice.text.tokenizer import ChatTokenizer, load_tokenizer

    tokenizer = load_tokenizer(letters().tokenizer_json, "letters")
    marks = ["<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    marked = ChatTokenizer(tokenizer, letters().chat)
    structure = call_structure([tool_of(time)], ToolStyle.HERMES, marked)
    forced = list(open_grammar(structure, marked, tokenizer.get_vocab_size()).forced)
    assert forced[0] == tokenizer.token_to_id(marks[0])
    assert parse_calls(answer_text(marked, forced), ToolStyle.HERMES)[1][0].name == "time"


@pytest.mark.parametrize(
    ("tools", "style", "reason"),
    [
        (TOOLS, ToolStyle.GEMMA, "not write calls in JSON"),
        ([], ToolStyle.HERMES, "there are no tools"),
        ([{"name": "flat"}], ToolStyle.HERMES, r"tools\[0\].function is NoneType"),
        (["time"], ToolStyle.HERMES, r"tools\[0\] is str"),
        (
            [{"function": {"name": "f", "parameters": 5}}],
            ToolStyle.HERMES,
            r"tools\[0\].function.parameters is int",
        ),
    ],
)
def test_what_cannot_be_required_is_refused(tools: Any, style: ToolStyle, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        call_structure(tools, style, letters())
