"""What the server refuses, and how: a status, and an error in OpenAI's form that names the
parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ssdevice.errors import BundleError
from ssdevice.runtime.session import Session
from ssdevice.serve import decoder
from tests.runtime.tiny_bundle import APP
from tests.serve.serving import CHAT, TEXT, USER, ask, chat, served, tiny_session, tool

KEY = "a key of 16 characters".replace(" ", "-")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with tiny_session() as session:
        yield session


@pytest.fixture(scope="module")
def port(session: Session) -> Iterator[int]:
    with served(session) as (port, _):
        yield port


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("an unknown parameter", {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ("two answers", {"n": 2}, "n", "n can only be 1 here"),
    ("true for a number", {"n": True}, "n", "n can only be 1 here"),
    (
        "an effort",
        {"reasoning_effort": "low"},
        "reasoning_effort",
        "unknown key 'reasoning_effort'",
    ),
    ("no text in messages", {"messages": "hello"}, None, "messages is str"),
    ("two questions", {"messages": [USER, USER]}, None, "role 'user' cannot come after 'user'"),
    (
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        None,
        "reads text only",
    ),
    ("a cold temperature", {"temperature": -1}, None, "temperature is -1"),
    ("a temperature in words", {"temperature": "hot"}, None, "temperature is 'hot'"),
    ("no top_p", {"temperature": 1, "top_p": 0}, None, "top_p is 0"),
    ("a huge seed", {"seed": 1 << 64}, None, "seed is 18446744073709551616"),
    ("a stream in words", {"stream": "maybe"}, "stream", "expected True or False"),
    (
        "usage without a stream",
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "goes with stream",
    ),
    ("no tokens", {"max_tokens": 0}, "max_tokens", "expected 1 or more"),
    ("half a token", {"max_tokens": 1.5}, "max_tokens", "expected a whole number"),
    ("two limits", {"max_completion_tokens": 3}, "max_tokens", "give one of them"),
    ("alternatives without logprobs", {"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    (
        "too many alternatives",
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "expected 0 to 20",
    ),
    ("an empty stop", {"stop": [""]}, "stop", "none of them empty"),
    ("many stops", {"stop": ["a"] * 17}, "stop", "at most 16"),
    ("a bias of a word", {"logit_bias": {"hello": 1}}, "logit_bias", "its keys are token ids"),
    (
        "a bias of no token",
        {"logit_bias": {"4000": 1}},
        None,
        "token 4000 is not one of the model's",
    ),
    ("a bias of 401 digits", {"logit_bias": {"5": -(10**400)}}, None, "from -1e30 to 1e30"),
    ("a bias beyond float32", {"logit_bias": {"5": -1e39}}, None, "from -1e30 to 1e30"),
    (
        "a penalty that makes scores infinite",
        {"repetition_penalty": 1e-37, "temperature": 1e-6, "top_p": 0.5},
        None,
        "repetition_penalty is 1e-37, expected 0.01 to 100",
    ),
    (
        "another form",
        {"response_format": {"type": "xml"}},
        "response_format",
        "expected text, json_object",
    ),
    (
        "no schema",
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "json_schema is NoneType",
    ),
    (
        "a schema that is none",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "number", "minimum": "a"}},
            }
        },
        None,
        "JSON schema",
    ),
    (
        "tools and a form",
        {"tools": [tool()], "response_format": {"type": "json_object"}},
        "tools",
        "cannot go with",
    ),
    ("a choice of no tools", {"tool_choice": "required"}, "tool_choice", "needs tools"),
    ("a tool that is none", {"tools": [{"type": "retrieval"}]}, "tools", "expected 'function'"),
    ("a tool without a name", {"tools": [tool("")]}, "tools", "name is empty"),
    (
        "another function",
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "hide"}}},
        "tool_choice",
        "names none of the functions look",
    ),
    ("half a character for a key", {"\ud83d": 1}, "\ud83d", "unknown key"),
    (
        "half a character for a function",
        {
            "tools": [tool("\ud83d")],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
        "tool_choice",
        "names none of the functions \ud83d",
    ),
]


@pytest.mark.parametrize(
    ("more", "param", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_makes_no_sense_is_refused(
    port: int, more: dict[str, Any], param: str | None, words: str
) -> None:
    for stream in (
        ({}, {"stream": True}) if not more.keys() & {"stream", "stream_options"} else ({},)
    ):
        status, answer = ask(port, CHAT, chat(**stream, **more))
        error = answer["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert words in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "expected a JSON object"),
        (b'{"model": 1, "model": 2}', "appears twice"),
        (b"[" * 10_000, "nested deeper than 128 levels"),
        (b'{"messages": []}', "model is missing"),
        (f'{{"model": "{APP}"}}'.encode(), "messages is missing"),
    ],
)
def test_content_that_is_no_request_is_refused(port: int, content: bytes, words: str) -> None:
    status, answer = ask(port, CHAT, content)
    assert status == 400 and words in answer["error"]["message"]


@pytest.mark.parametrize(
    "prompt", [None, 3, {}, [], "", ["a", "b"], [[1], [2]], [4000], [-1], [True]]
)
def test_a_prompt_is_one_text_or_ids(port: int, prompt: Any) -> None:
    status, _ = ask(port, TEXT, {"model": APP, "prompt": prompt})
    assert status == 400


def test_what_does_not_fit_the_context_is_refused(port: int) -> None:
    long = {"role": "user", "content": "word " * 400}
    for path, more in ((CHAT, {"messages": [long]}), (TEXT, {"prompt": long["content"]})):
        status, answer = ask(port, path, {"model": APP, **more})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_values_that_ask_for_nothing_are_accepted(port: int) -> None:
    neutral = {
        "n": 1,
        "store": False,
        "parallel_tool_calls": True,
        "user": "me",
        "stop": None,
        "tools": [],
    }
    assert ask(port, CHAT, chat(**neutral))[0] == 200
    assert (
        ask(
            port,
            CHAT,
            chat(tools=[tool()], tool_choice="none", response_format={"type": "json_object"}),
        )[0]
        == 200
    )


def test_an_unknown_model_and_path_are_404(port: int) -> None:
    status, answer = ask(port, CHAT, chat(model="gpt-4"))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert ask(port, "/v1/embeddings", {})[0] == 404
    status, answer = ask(port, CHAT)
    assert status == 405 and answer["error"]["message"]


def test_a_bundle_that_chooses_in_its_graph_serves_greedily_only() -> None:
    with tiny_session(choose=False) as session, served(session) as (port, _):
        assert ask(port, CHAT, chat(temperature=0, seed=3))[0] == 200
        for more in (
            {"temperature": 0.5},
            {"logprobs": True},
            {"response_format": {"type": "json_object"}},
        ):
            status, answer = ask(port, CHAT, chat(**more))
            assert status == 400 and "export it with --choose host" in answer["error"]["message"]


def test_only_names_of_this_machine_are_answered(port: int) -> None:
    for name, status in (
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("LOCALHOST:9", 200),
        ("[::1]:80", 200),
    ):
        assert ask(port, "/health", Host=name)[0] == status


def test_what_pages_may_send_unasked_is_refused(port: int) -> None:
    assert ask(port, CHAT, chat(), Content_Type="text/plain")[0] == 415
    assert ask(port, CHAT, chat(), Content_Type="application/json; charset=utf-8")[0] == 200


def test_a_key_is_needed_everywhere_but_for_health(session: Session) -> None:
    with served(session, key=KEY) as (port, _):
        assert ask(port, "/health") == (200, {"status": "ok"})
        for headers in (
            {},
            {"Authorization": f"Bearer {KEY}x"},
            {"Authorization": KEY},
            {"Authorization": "Bearer é"},
        ):
            status, answer = ask(port, "/v1/models", **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert ask(port, CHAT, chat(), Authorization=f"Bearer {KEY}")[0] == 200


def test_a_failure_is_the_server_s_and_it_lives_on(
    session: Session, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        for error, words in (
            (BundleError("the graph is damaged"), "damaged"),
            (ZeroDivisionError("secret"), "its log"),
        ):

            def fail(*_: Any, error: Exception = error) -> Any:
                raise error

            patch.setattr(decoder, "_ids", fail)
            for stream in (False, True):
                status, answer = ask(port, CHAT, chat(stream=stream))
                assert (status, answer["error"]["type"]) == (500, "server_error")
                assert (
                    words in answer["error"]["message"]
                    and "secret" not in answer["error"]["message"]
                )
    assert "ZeroDivisionError: secret" in caplog.text
    assert ask(port, CHAT, chat())[0] == 200
