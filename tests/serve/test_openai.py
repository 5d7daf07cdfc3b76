"""The server as OpenAI's own client meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.sampling.structure import Structure
from ssdevice.runtime.session import Session
from ssdevice.serve import decoder
from ssdevice.serve.names import LOOPBACK
from tests.runtime.tiny_bundle import APP
from tests.serve.serving import USER, served, tiny_session, tokenizer, tool

if TYPE_CHECKING:
    import openai  # 1.7 s, which tests pay that use it

LOOK = tool(city={"enum": ["Rome", "Oslo"]})


@pytest.fixture(scope="module")
def other() -> Iterator[Session]:
    """What the server should answer is asked of another session."""
    with tiny_session() as session:
        yield session


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    import openai

    with tiny_session() as session, served(session) as (port, _):
        yield openai.OpenAI(base_url=f"http://{LOOPBACK}:{port}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        **{"model": APP, "messages": [USER], "max_tokens": 12, **more}
    )


def test_apps_are_models(client: openai.OpenAI) -> None:
    import openai

    assert [model.id for model in client.models.list()] == [APP]
    assert client.models.retrieve(APP).owned_by == "ssdevice"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'another'; the bundle's apps are letters"
    ):
        client.models.retrieve("another")


def test_an_answer_is_that_of_a_session(client: openai.OpenAI, other: Session) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    answer = ask(client, messages=messages, temperature=0)
    assert answer.choices[0].message.content == "".join(
        other.chat(messages=messages, max_tokens=12)
    )
    assert (
        answer.choices[0].message.role == "assistant"
        and answer.choices[0].finish_reason == "length"
    )
    assert answer.usage.prompt_tokens == other.last.prompt_tokens
    assert (
        answer.usage.completion_tokens == 12
        and answer.usage.total_tokens == other.last.prompt_tokens + 12
    )


def test_without_a_temperature_the_answer_is_greedy(client: openai.OpenAI) -> None:
    zero = [
        {"temperature": 0, "top_p": 0.5},
        {"temperature": 0, "seed": 1},
        {"temperature": 0, "seed": 2},
    ]
    assert len({ask(client, **more).choices[0].message.content for more in ({}, *zero)}) == 1


def test_a_seed_gives_one_answer_and_none_a_new_one_each_time(
    client: openai.OpenAI, other: Session
) -> None:
    def said(**more: Any) -> Any:
        return ask(client, temperature=1.5, **more)

    sampling = Sampling(
        temperature=1.5, top_p=0.9, presence_penalty=0.5, logit_bias={9: 3.0}, seed=7
    )
    asked = {"top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {"9": 3.0}, "seed": 7}
    expected = "".join(other.chat(messages=[USER], max_tokens=12, sampling=sampling))
    assert said(**asked).choices[0].message.content == expected
    first = said()
    second = said()
    assert first.choices[0].message.content != second.choices[0].message.content
    assert said(seed=first.seed).choices[0].message.content == first.choices[0].message.content


def test_what_asks_for_sampling_without_a_temperature_samples_at_1(client: openai.OpenAI) -> None:
    def said(**more: Any) -> Any:
        return ask(client, seed=3, **more).choices[0].message.content

    assert said() == said(temperature=1) != ask(client).choices[0].message.content
    assert said(top_p=0.7) == said(temperature=1, top_p=0.7)


def test_what_typical_acceptance_may_have_changed_is_marked(client: openai.OpenAI) -> None:
    import openai

    inexact = {"extra_body": {"typical_acceptance": 0.1}}
    assert ask(client, temperature=1, **inexact).inexact is True
    assert not hasattr(ask(client, temperature=1), "inexact")
    with pytest.raises(
        openai.BadRequestError, match="typical_acceptance goes with a temperature above 0"
    ):
        ask(client, temperature=0, **inexact)


def test_a_stream_has_the_same_text_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = ask(client)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:] == [
        None,
        "length",
    ]
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in ask(client, stream=True))


def test_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    cut = ask(client, stop=whole[5:7])
    assert cut.choices[0].message.content == whole[: whole.index(whole[5:7])]
    assert cut.choices[0].finish_reason == "stop"


def test_log_probabilities_are_the_model_s(client: openai.OpenAI, other: Session) -> None:
    "".join(other.chat(messages=[USER], max_tokens=12, sampling=Sampling(logprobs=3)))
    expected = other.last
    streamed = [
        each
        for chunk in ask(client, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    for found in (ask(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content, streamed):
        # Adaptive decoding's timings decide between one row and a tree, and ONNX Runtime's own
        # operators round by rows.
        assert [each.logprob for each in found] == pytest.approx(
            [each.chosen for each in expected.logprobs], abs=1e-5
        )
        for each, values in zip(found, (each.values for each in expected.logprobs), strict=True):
            assert [top.logprob for top in each.top_logprobs] == pytest.approx(values, abs=1e-5)
        assert bytes(b for each in found for b in each.bytes).decode() == expected.text


def test_the_cache_holds_the_conversation(client: openai.OpenAI) -> None:
    first = ask(client)
    again = [
        USER,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "b"},
    ]
    usage = ask(client, messages=again).usage
    assert usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 2


def test_a_template_is_given_arguments(client: openai.OpenAI) -> None:
    import openai

    loud = ask(client, extra_body={"chat_template_kwargs": {"loud": True}})
    assert loud.usage.prompt_tokens > ask(client).usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="does not read 'quiet'"):
        ask(client, extra_body={"chat_template_kwargs": {"quiet": True}})


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_an_answer_has_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    described = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
    }
    answer = ask(client, response_format=described, max_tokens=40)
    assert json.loads(answer.choices[0].message.content)["n"] in range(10)
    assert answer.choices[0].finish_reason == "stop"
    begun = ask(client, response_format={"type": "json_object"}).choices[0].message.content
    assert begun.startswith("{")
    assert ask(client, response_format={"type": "text"}).choices == ask(client).choices


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_can_be_forced(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = ask(client, tools=[LOOK], tool_choice=choice, max_tokens=60, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        assert not any(chunk.delta.content for chunk in chunks)
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        reason = chunks[-1].finish_reason
    else:
        message = answer.choices[0].message
        reason = answer.choices[0].finish_reason
        calls = message.tool_calls
        assert message.content is None
    assert reason == "tool_calls" and len(calls) == 1 and calls[0].id
    assert calls[0].function.name == "look"
    assert json.loads(calls[0].function.arguments)["city"] in ("Rome", "Oslo")


def test_functions_may_define_one_name_in_two_ways(client: openai.OpenAI) -> None:
    tools = [tool(name, n={"$ref": "#/$defs/x"}) for name in ("one", "two")]
    for each, values in zip(tools, ([1], [2]), strict=True):
        each["function"]["parameters"]["$defs"] = {"x": {"enum": values}}
    for name, n in (("one", 1), ("two", 2)):
        choice = {"type": "function", "function": {"name": name}}
        called = (
            ask(client, tools=tools, tool_choice=choice, max_tokens=60)
            .choices[0]
            .message.tool_calls
        )
        assert [(call.function.name, json.loads(call.function.arguments)) for call in called] == [
            (name, {"n": n})
        ]


CALL = '<tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        (f"Well {CALL}", "Well", ["look"]),
        (CALL, None, ["look"]),
        (CALL.replace("Rome", "\\ud83d"), None, ["look"]),  # half a character
        (CALL.replace("look", "cook"), CALL.replace("look", "cook"), []),
        ("<tool_call>{not one", "<tool_call>{not one", []),
        (CALL.removeprefix("<tool_call>").removesuffix("</tool_call>"), None, ["look"]),
        ('<tool_call>{"name": "none"}</tool_call>', None, ["none"]),
        ("a < b, <tool", "a < b, <tool", []),
    ],
)
def test_calls_are_found_and_what_only_looks_like_one_is_text(
    client: openai.OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    content: str | None,
    called: list[str],
) -> None:
    writing = Sampling(structure=Structure.regex(re.escape(text).replace("\\ ", " ")))
    monkeypatch.setattr(decoder, "_sampling", lambda *_: writing)
    asked = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [LOOK, tool("none")],
        "max_tokens": 80,
    }
    whole = ask(client, **asked).choices[0]
    assert whole.message.content == content
    assert [call.function.name for call in whole.message.tool_calls or []] == called
    assert whole.finish_reason == ("tool_calls" if called else "stop")
    chunks = [chunk.choices[0] for chunk in ask(client, **asked, stream=True)]
    streamed = "".join(chunk.delta.content or "" for chunk in chunks)
    assert (streamed.strip() or None) == content
    assert [
        call.function.name for chunk in chunks for call in chunk.delta.tool_calls or []
    ] == called
    assert chunks[-1].finish_reason == whole.finish_reason
    assert not called or "<" not in streamed


@pytest.mark.parametrize("written", ["", " ", None, "{}", '{"x": 1e999}', '{"x": 1, "x": 2}'])
def test_arguments_come_back_as_they_were_sent(client: openai.OpenAI, written: Any) -> None:
    """A client sends a model's calls back as it got them."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": written}}
    result = {"role": "tool", "tool_call_id": "1", "content": "b"}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": "a"}, said, result]
    tools = [{"type": "function", "function": {"name": "f", "parameters": None}}]
    assert ask(client, messages=messages, tools=tools, max_tokens=2).choices[0].message


def test_results_of_calls_are_given_back(client: openai.OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    answer = ask(client, messages=[*asked, {"role": "tool", "tool_call_id": "1", "content": "b"}])
    assert answer.usage.completion_tokens == 12


def test_completions_continue_a_text(client: openai.OpenAI, other: Session) -> None:
    ids = tokenizer().encode("once")
    for run in other.runs(ids, max_tokens=16, sampling=Sampling(logprobs=1)):
        del run
    for prompt in ("once", ["once"], ids, [ids]):
        answer = client.completions.create(model=APP, prompt=prompt, logprobs=1)
        assert answer.choices[0].text == other.last.text
        assert answer.usage.completion_tokens == len(other.last.tokens)
    found = answer.choices[0].logprobs
    assert "".join(found.tokens) == other.last.text
    assert [
        answer.choices[0].text[at:][: len(token)]
        for at, token in zip(found.text_offset, found.tokens, strict=True)
    ] == found.tokens
    assert np.allclose(found.token_logprobs, [each.chosen for each in other.last.logprobs])
    streamed = client.completions.create(model=APP, prompt="once", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == other.last.text
