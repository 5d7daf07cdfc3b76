"""Calls that are required: whatever the model would say, one of the tools is called with arguments
of its schema.
"""

from __future__ import annotations

import json
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


DRAFT = "https://json-schema.org/draft/2020-12/schema"
A = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
B = {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("parameters", "fits", "misfits"),
    [
        (None, "{}", ('{"a": 1}', "[]")),
        ({}, '{"a": [1]}', ("[]", "3", "null")),
        ({"description": "none"}, '{"a": 1}', ('"a"',)),
        ({"properties": {"a": {"type": "string"}}}, '{"a": "x"}', ("[]", '{"b": 1}')),
        ({**A, "type": ["object", "null"]}, '{"a": "x"}', ("null", '{"a": "x", "b": 1}')),
        ({"$ref": "#/$defs/x", "$defs": {"x": A}}, '{"a": "x"}', ("[]", "{}")),
        ({"$ref": "#/$defs/x", "$defs": {"x": {}}}, '{"a": "x"}', ("[]", "1")),
        ({**A, "allOf": [B]}, '{"a": "x", "b": 1}', ('{"a": "x"}', '{"b": 1}')),
        ({**A, "anyOf": [B, {"type": "array"}]}, '{"a": "x", "b": 1}', ("[]", '{"a": "x"}')),
        ({"anyOf": [A, B]}, '{"b": 1}', ("[]", "{}")),
        ({**A, "required": ["a", "b"]}, '{"a": "x", "b": []}', ('{"a": "x"}',)),
        ({**A, "additionalProperties": {"type": "null"}}, '{"a": "x", "b": null}', ('{"b": 1}',)),
        ({**A, "title": "f", "$schema": DRAFT}, '{"a": "x"}', ('{"a": "x", "b": 1}',)),
        ({"properties": {"a": {"$ref": "#"}}}, '{"a": {"a": {}}}', ('{"a": 1}', '{"a": {"b": 1}}')),
    ],
)
def test_arguments_are_an_object_that_fits(
    parameters: Any, fits: str, misfits: tuple[str, ...]
) -> None:
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    structure = call_structure(tools, ToolStyle.LLAMA3, letters())

    def accepts(values: str) -> bool:
        grammar = open_grammar(structure, letters(), VOCAB)
        rest = f'{{"name": "f", "parameters": {values}}}'
        texts = {token: letters().decode([token]) for token in range(VOCAB)}
        while rest:
            allowed = [
                token
                for token, text in texts.items()
                if text and rest.startswith(text) and grammar.allows(token)
            ]
            if not allowed:
                return False
            token = max(allowed, key=lambda token: len(texts[token]))
            grammar.accept(token)
            rest = rest[len(texts[token]) :]
        scores = grammar.masked(np.zeros(VOCAB, np.float32))
        return bool(np.isfinite(scores[letters().stop_ids[0]]))

    assert accepts(fits)
    assert not any(map(accepts, misfits))
    assert Draft202012Validator(parameters or {}).is_valid(json.loads(fits))


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
        (
            [{"function": {"name": "f", "parameters": {"type": "string"}}}],
            ToolStyle.HERMES,
            "function 'f': its parameters are of type 'string', expected 'object'",
        ),
    ],
)
def test_what_cannot_be_required_is_refused(tools: Any, style: ToolStyle, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        call_structure(tools, style, letters())
