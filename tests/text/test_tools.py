"""Calls in answers: what families write, and what is no call; schemas of Python functions."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ssdevice.errors import InputError
from ssdevice.text.call_stream import CallStream
from ssdevice.text.calls import Call
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tools import ToolStyle, answer_text, parse_calls, tool_of
from tests.runtime.scripted import TEMPLATE, make_tokenizer

WEATHER = Call("weather", {"city": "Zürich", "days": 2})
TIME = Call("time", {})
HERMES, LLAMA3, GEMMA = ToolStyle
GEMMA4 = "<|tool_call>call:%s{%s}<tool_call|>"

CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'

ANSWERS: list[tuple[ToolStyle, str, str, list[Call]]] = [
    (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n'
        "</tool_call>",
        "",
        [WEATHER],
    ),
    (
        HERMES,
        'I look.\n<tool_call>{"name": "time", "arguments": {}}</tool_call>\n'
        '<tool_call>{"arguments": {"city": "Zürich", "days": 2}, "name": "weather"}</tool_call>'
        " Wait.",
        "I look.\n\n Wait.",
        [TIME, WEATHER],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [Call("f", {"a": "</tool_call>"})],
    ),
    (
        HERMES,
        '<tool_call>{"name": "time", "arguments": "{}"}',
        "",
        [TIME],
    ),  # the stop token came first
    (LLAMA3, '{"name": "weather", "parameters": {"city": "Zürich", "days": 2}}', "", [WEATHER]),
    (LLAMA3, '<|python_tag|>{"type": "function", "name": "time", "parameters": {}}', "", [TIME]),
    (
        LLAMA3,
        '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}\n',
        "",
        [TIME, TIME],
    ),
    (LLAMA3, 'Let me see.<|python_tag|>{"name": "time", "parameters": {}}', "Let me see.", [TIME]),
    (
        GEMMA,
        "<start_function_call>call:weather{city:<escape>Zürich<escape>,days:2}<end_function_call>",
        "",
        [WEATHER],
    ),
    (
        GEMMA,
        "Yes." + GEMMA4 % ("weather", 'city:<|"|>Zürich<|"|>,days:2') + GEMMA4 % ("time", ""),
        "Yes.",
        [WEATHER, TIME],
    ),
    (
        GEMMA,
        GEMMA4
        % ("f", 'a:[<|"|>x, y: {z}<|"|>,-1.5e3],b-c:{d:true,e:null},t:<|"|>say "hi"\n\\<|"|>'),
        "",
        [
            Call(
                "f",
                {"a": ["x, y: {z}", -1500.0], "b-c": {"d": True, "e": None}, "t": 'say "hi"\n\\'},
            )
        ],
    ),
    (GEMMA, GEMMA4 % ("f", '<|"|>a b<|"|>:1'), "", [Call("f", {"a b": 1})]),
    (GEMMA, "<|tool_call>call:time{}", "", [TIME]),
    # Without marks, where the whole answer is calls.
    (HERMES, '\n{"name": "time", "arguments": {}}\n', "", [TIME]),
    (HERMES, '```json\n{\n "name": "time",\n "arguments": {}\n}\n```', "", [TIME]),
    (HERMES, '```{"arguments": {}, "name": "time"}```\n', "", [TIME]),
    (HERMES, '{"name": "time", "arguments": {}}\n' * 2, "", [TIME, TIME]),
    (GEMMA, '{"name": "time", "parameters": null}', "", [TIME]),
    (LLAMA3, '```\n{"name": "time", "parameters": {}}\n```', "", [TIME]),
    # Without arguments.
    *(
        (HERMES, f'<tool_call>{{"name": "time"{given}}}</tool_call>', "", [TIME])
        for given in (
            "",
            ', "arguments": null',
            ', "arguments": ""',
            ', "arguments": " "',
            ', "parameters": "null"',
        )
    ),
    (LLAMA3, '{"type": "function", "name": "time"}', "", [TIME]),
    (GEMMA, GEMMA4.replace("{%s}", "") % "time", "", [TIME]),
    # After a thought.
    (
        HERMES,
        f"<think>\nPerhaps {CALL}?\n</think>\n\n{CALL}",
        f"<think>\nPerhaps {CALL}?\n</think>",
        [TIME],
    ),
    (HERMES, f"{CALL}</think>{CALL}</think>{CALL}", f"{CALL}</think>{CALL}</think>", [TIME]),
    (HERMES, f"Let me see: <tool_call></think>{CALL}", "Let me see: <tool_call></think>", [TIME]),
    (
        HERMES,
        '<think>no</think>```json\n{"name": "time", "arguments": {}}\n```',
        "<think>no</think>",
        [TIME],
    ),
    (
        LLAMA3,
        '<think>{"name": "f", "parameters": {}}</think>{"name": "time", "parameters": {}}',
        '<think>{"name": "f", "parameters": {}}</think>',
        [TIME],
    ),
    (
        GEMMA,
        f"<think>{GEMMA4 % ('f', '')}</think>{GEMMA4 % ('time', '')}",
        f"<think>{GEMMA4 % ('f', '')}</think>",
        [TIME],
    ),
    # What is in a string of a call ends no thought.
    *(
        (style, text, "", [Call("f", {"a": "<think> or </think>"})])
        for style, text in (
            (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "<think> or </think>"}}'),
            (HERMES, '{"name": "f", "arguments": {"a": "<think> or </think>"}}'),
            (LLAMA3, '{"name": "f", "parameters": {"a": "<think> or </think>"}}'),
            (GEMMA, GEMMA4 % ("f", 'a:<|"|><think> or </think><|"|>')),
        )
    ),
]
NO_CALLS = [
    (HERMES, '<tool_call>{"name": "time", "arguments": {}'),
    (HERMES, "<tool_call>{\"name\": 'time'}</tool_call>"),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} or so</tool_call>'),
    (HERMES, "<tool_call>" * 3),
    (HERMES, "<tool_call>" + "[" * 100_000),
    (HERMES, "No call."),
    (HERMES, f"<think>\nPerhaps {CALL}"),
    (HERMES, f"<think>\nPerhaps {CALL}</think>\nNo."),
    (HERMES, f"Perhaps {CALL}</think>"),
    (HERMES, '{"name": "Ada"}'),
    (HERMES, '{"name": "Ada", "age": 36}'),
    (HERMES, '<tool_call>{"name": "f", "a": 1}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
    (HERMES, 'I call {"name": "time", "arguments": {}}'),
    (HERMES, '```json\n{"name": "time", "arguments": {}}\n``` is how I would call it.'),
    (LLAMA3, '{"name": "Ada", "age": 36}'),
    (LLAMA3, '<think>{"name": "time", "parameters": {}}'),
    (LLAMA3, '{"name": "time", "parameters": {}} is how I would call it.'),
    (LLAMA3, '{"answer": 4}'),
    (LLAMA3, '<|python_tag|>search.call(query="x")'),
    (GEMMA, GEMMA4 % ("f", "a:[1")),
    (GEMMA, "<|tool_call>call:f(a=1)<tool_call|>"),
    *((style, "") for style in ToolStyle),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), ANSWERS, ids=range(len(ANSWERS)))
def test_calls_in_an_answer(style: ToolStyle, text: str, content: str, calls: list[Call]) -> None:
    assert parse_calls(text, style) == (content, calls)


@pytest.mark.parametrize(("style", "text"), NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_call_stays_in_the_text(style: ToolStyle, text: str) -> None:
    assert parse_calls(text, style) == (text, [])


def test_a_prompt_may_have_begun_the_thought() -> None:
    assert parse_calls(f"Perhaps {CALL}", HERMES, thinking=True) == (f"Perhaps {CALL}", [])
    text = f"Perhaps {CALL}</think>{CALL}"
    assert parse_calls(text, HERMES, thinking=True) == (f"Perhaps {CALL}</think>", [TIME])


LARGEST = sys.float_info.max


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{"x": 1e999, "y": [-1e400]}', {"x": LARGEST, "y": [-LARGEST]}),
        ('{"x": %s}' % ("9" * 5000), {"x": LARGEST}),
        ('{"x": 0.10, "y": 1E2,\n "z": "\\ud83d"}', {"x": 0.1, "y": 100.0, "z": "\ud83d"}),
    ],
)
def test_arguments_are_json_as_the_model_wrote_it(written: str, value: dict[str, Any]) -> None:
    for style, text in (
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'),
        (HERMES, json.dumps({"name": "f", "arguments": written})),
        (LLAMA3, f'{{"name": "f", "parameters": {written}}}'),
    ):
        (call,) = parse_calls(text, style)[1]
        assert call.arguments == value and call.text == written
        json.dumps(call.arguments, allow_nan=False)


def test_arguments_of_the_gemma_family_become_json() -> None:
    (call,) = parse_calls(GEMMA4 % ("f", 'x:1e999,y:<|"|>a"b<|"|>'), GEMMA)[1]
    assert call.arguments == {"x": LARGEST, "y": 'a"b'}
    assert call.text == '{"x":1e999,"y":"a\\"b"}'


@cache
def byte_tokenizer() -> ChatTokenizer:
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    stop = tokenizer.token_to_id("</s>")
    return ChatTokenizer(tokenizer, ChatFormat(TEMPLATE, {"eos_token": "</s>"}, (stop,)))


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("style", "text"), [case[:2] for case in [*ANSWERS, *NO_CALLS] if len(case[1]) < 1000]
)
def test_a_stream_shows_what_is_certainly_no_call(
    style: ToolStyle, text: str, thinking: bool
) -> None:
    """And nothing of a call, whatever the pieces."""
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text)
    content, calls = parse_calls(text, style, thinking)
    whole = CallStream(tokenizer, style, thinking).push(tokens)
    for step in (1, 5):
        stream = CallStream(tokenizer, style, thinking)
        shown = [stream.push(tokens[at : at + step]) for at in range(0, len(tokens), step)]
        assert shown == sorted(shown) and shown[-1:] in ([whole], [])
    if calls:
        assert text[:whole].strip() == content[: len(text[:whole].strip())]
        assert "name" not in text[:whole].rpartition("</think>")[2]
    if thinking and "</think>" not in text:
        assert whole == len(text)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{% if tools %}<tools>..</tools> within <tool_call></tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call>\n<function=example>{% endif %}", None),  # Qwen 3 Coder's XML
        (
            '{{ \'Environment: ipython\' }} Respond in the format {"name": .., "parameters": ..}',
            LLAMA3,
        ),
        ("{{ '<|python_tag|>' + call }}", LLAMA3),
        ("{{ '<start_function_call>call:' + name }}", GEMMA),
        ("{{ '<|tool_call>call:' + name }}", GEMMA),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_template_tells_its_style(template: str | None, style: ToolStyle | None) -> None:
    assert ToolStyle.of(template) is style


def test_special_tokens_of_an_answer_are_written_out() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("<user>ab</s>")
    assert tokenizer.decode(ids) == "ab"
    assert answer_text(tokenizer, ids) == "<user>ab"


def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", *, at: list[float] | None = None
) -> str:
    """Say what the weather
    will be.

    It may be wrong.

    Args:
        city: The city, such as Rome: its name.
        days (int): How many days.
        of_no_parameter: ignored.

    Returns:
        city: not this one.
    """
    return f"{city} {days} {unit} {at}"


def test_a_function_is_a_tool() -> None:
    tool = tool_of(weather)
    assert tool["type"] == "function" and tool["function"]["name"] == "weather"
    assert tool["function"]["description"] == "Say what the weather will be."
    schema = tool["function"]["parameters"]
    Draft202012Validator.check_schema(schema)
    assert schema["required"] == ["city"]
    assert schema["properties"]["city"] == {
        "type": "string",
        "description": "The city, such as Rome: its name.",
    }
    check = Draft202012Validator(schema).is_valid
    assert check({"city": "Rome"}) and check({"city": "Rome", "days": 2, "unit": "F", "at": [1.5]})
    assert check({"city": "Rome", "at": None})
    for wrong in (
        {},
        {"city": 1},
        {"city": "x", "days": "2"},
        {"city": "x", "unit": "K"},
        {"city": "x", "more": 1},
    ):
        assert not check(wrong)
    assert json.loads(json.dumps(tool)) == tool


def test_a_function_without_types_is_refused() -> None:
    def untyped(a) -> None: ...  # type: ignore[no-untyped-def]

    def many(*a: int) -> None: ...

    def strange(a: complex) -> None: ...

    def keys(a: dict[int, int]) -> None: ...

    def unknown(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    functions: list[Any] = [untyped, many, strange, keys, unknown]
    for function in functions:
        with pytest.raises(InputError, match=function.__name__):
            tool_of(function)
