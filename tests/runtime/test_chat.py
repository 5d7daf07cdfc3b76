"""Conversations stated as messages: what is computed, what is refused, what is forgotten."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.runtime.generation import Reason
from ssdevice.runtime.session import Session
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.tree import Tree
from tests.runtime.scripted import TEMPLATE, cache_of, continuation, make_session

TREE = Tree.of([[0], [1], [0, 0], [0, 0, 0]])
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "Be brief."}


def call(name: str = "f", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}, **more}],
    }


def ids_of(session: Session, text: str) -> list[int]:
    return session.tokenizer.encode(text)


def truth(session: Session, text: str, count: int) -> str:
    tokens = continuation(ids_of(session, text), count, session.engine.geometry.vocab)
    return session.tokenizer.decode(tokens[: tokens.index(0)] if 0 in tokens else tokens)


def test_messages_state_the_whole_conversation_and_a_prompt_continues_it() -> None:
    session = make_session(TREE)
    "".join(session.chat("something else", max_tokens=9))
    text = "".join(
        session.chat(
            messages=[SYSTEM, USER, ANSWER, {"role": "user", "content": "b"}], max_tokens=9
        )
    )
    written = "<system>Be brief.</s><user>hello</s><assistant>yes</s><user>b</s><assistant>"
    assert text == truth(session, written, 9)
    assert session.messages == [
        SYSTEM,
        USER,
        ANSWER,
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": text},
    ]
    again = "".join(session.chat("c", max_tokens=9))
    assert again == truth(session, f"{written}{text}</s><user>c</s><assistant>", 9)


def test_a_restored_conversation_computes_only_what_the_cache_does_not_hold() -> None:
    session = make_session(TREE)
    "".join(session.chat("a long first message of many letters", max_tokens=9))
    before = session.messages
    chunks = cache_of(session._conversation).chunks
    "".join(session.generate("a", max_tokens=2))
    chunks.clear()
    "".join(session.chat(messages=[*before, USER], max_tokens=9))
    assert sum(chunks) > 40
    kept = session.messages
    chunks.clear()
    "".join(session.chat(messages=[*kept, {"role": "user", "content": "b"}], max_tokens=9))
    assert sum(chunks) < 10
    chunks.clear()
    "".join(session.chat(messages=[*kept[:-1]], max_tokens=9))
    assert sum(chunks) == 1


def test_messages_that_are_set_are_the_conversation_from_then_on() -> None:
    session = make_session(TREE)
    "".join(session.chat("something else", max_tokens=5))
    late = session.chat("b", max_tokens=5)
    running = session.chat("c", max_tokens=20)
    next(running)
    session.messages = [SYSTEM, USER, ANSWER]
    for answer in (late, running):
        with pytest.raises(InputError, match="ended by a newer one, by reset"):
            next(answer)
    assert session.messages == [SYSTEM, USER, ANSWER]
    text = "".join(session.chat("b", max_tokens=9))
    written = "<system>Be brief.</s><user>hello</s><assistant>yes</s><user>b</s><assistant>"
    assert text == truth(session, written, 9)
    before = session.messages
    for wrong, words in (
        ([USER], "messages ends with 'user'; the last one must be of role system or assistant"),
        ([ANSWER], "role 'assistant' cannot be the first"),
        ("hello", "messages is str .*, expected a list of objects"),
    ):
        with pytest.raises(InputError, match=words):
            session.messages = wrong  # type: ignore[assignment]
    assert session.messages == before
    session.messages = []
    assert "".join(session.chat("b", max_tokens=9)) == truth(session, "<user>b</s><assistant>", 9)


def test_the_system_message_can_be_given_apart_and_changed() -> None:
    session = make_session(TREE)
    first = "".join(session.chat("a", system="Be brief.", max_tokens=5))
    assert first == truth(session, "<system>Be brief.</s><user>a</s><assistant>", 5)
    written = f"<user>a</s><assistant>{first}</s><user>b</s><assistant>"
    request = session.chat("b", system="Be kind.", max_tokens=5)
    assert "".join(request) == truth(session, f"<system>Be kind.</s>{written}", 5)
    assert [message["content"] for message in session.messages][:2] == ["Be kind.", "a"]
    with pytest.raises(InputError, match="the messages have a system message of their own"):
        session.chat(messages=[SYSTEM, USER], system="Be kind.")


def test_an_instruction_goes_before_each_message_of_the_user_and_is_not_in_messages() -> None:
    session = make_session(TREE)
    session.instruction = "Do it."
    text = "".join(
        session.chat(messages=[USER, ANSWER, {"role": "user", "content": "b"}], max_tokens=5)
    )
    written = "<user>Do it.\nhello</s><assistant>yes</s><user>Do it.\nb</s><assistant>"
    assert text == truth(session, written, 5) and session.messages[0] == USER


def test_parts_of_a_content_are_lines() -> None:
    session = make_session(TREE)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ids = session.prompt_ids(messages=[{"role": "user", "content": parts}])
    assert ids == ids_of(session, "<user>a\nb</s><assistant>")


REFUSED = [
    ("hello", "messages is str .*, expected a list of objects"),
    ({"role": "user"}, "messages is dict .*, expected a list of objects"),
    (5, "messages is int .*, expected a list of objects"),
    (float("nan"), "messages is float .*, expected a list of objects"),
    ([], "messages is empty"),
    (["hello"], r"messages\[0\] is str"),
    ([{"content": "x"}], r"messages\[0\]: role None, expected system, user, assistant, tool"),
    ([{"role": ["user"], "content": "x"}], r"messages\[0\]: role \['user'\]"),
    ([{"role": "developer", "content": "x"}], "role 'developer', expected"),
    ([ANSWER, USER], "role 'assistant' cannot be the first; expected system or user"),
    ([USER, USER], r"messages\[1\]: role 'user' cannot come after 'user'; expected assistant"),
    ([USER, SYSTEM], "role 'system' cannot come after 'user'"),
    ([SYSTEM, ANSWER, USER], "role 'assistant' cannot come after 'system'"),
    ([SYSTEM], "messages ends with 'system'; the last one must be of role user or tool"),
    ([USER, ANSWER], "messages ends with 'assistant'"),
    ([USER, call()], "messages ends with 'tool calls'"),
    ([USER, {"role": "tool", "content": "5"}], "role 'tool' cannot come after 'user'"),
    ([USER, call(), USER], "role 'user' cannot come after 'tool calls'; expected tool"),
    (
        [USER, call(), {"role": "tool", "tool_call_id": "2", "content": "5"}],
        "'2' is none of the calls 1",
    ),
    ([USER, call(arguments="{")], r"tool_calls\[0\]\.function\.arguments: not JSON"),
    ([USER, call(arguments="[]")], r"function\.arguments is list .*, expected an object"),
    ([USER, call(name=None)], r"function\.name is NoneType"),
    (
        [USER, {"role": "assistant", "tool_calls": {}}],
        "tool_calls is dict .*, expected a list of objects",
    ),
    ([USER, {"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]\.function is NoneType"),
    ([USER, call(weight=float("nan"))], "cannot be written as JSON"),
    ([{"role": "user", "content": " \n"}], r"messages\[0\]: the message of the user is empty"),
    ([{"role": "user", "content": []}], r"messages\[0\]: the message of the user is empty"),
    ([{"role": "user", "content": None}], "content is NoneType"),
    ([{"role": "user", "content": float("nan")}], "content is float"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "a part of type 'image_url'; the model",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]: text is NoneType"),
    ([{"role": "user", "content": ["x"]}], r"content\[0\] is str"),
    ([{"role": "user", "content": "x", "nmae": "y"}], "unknown key 'nmae', did you mean 'name'"),
    ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
]


@pytest.mark.parametrize(("messages", "expected"), REFUSED)
def test_messages_in_another_form_or_order_are_refused_in_words(
    messages: Any, expected: str
) -> None:
    session = make_session(TREE)
    "".join(session.chat("a", max_tokens=3))
    before = session.messages
    last = session.last
    with pytest.raises(InputError, match=expected):
        session.chat(messages=messages)
    assert session.messages == before and session.last is last


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "give either the prompt, the user's next message, or messages"),
        ({"prompt": "a", "messages": [USER]}, "give either the prompt"),
        ({"prompt": "a", "tools": "f"}, "tools is str .*, expected a list of objects"),
        ({"prompt": "a", "tools": ["f"]}, r"tools\[0\] is str"),
        ({"prompt": "a", "tools": [{"f": float("nan")}]}, "tools cannot be written as JSON"),
        (
            {"prompt": "a", "tools": [{"type": "function"}]},
            "does not read 'tools'; it reads roles and contents",
        ),
        (
            {"prompt": "a", "template": {"enable_thinking": False}},
            "does not read 'enable_thinking'",
        ),
        ({"prompt": "a", "template": "x"}, "template is str"),
        ({"prompt": "a", "template": {3: 4}}, "a name in template is int"),
        ({"prompt": "a", "template": {"messages": []}}, "'messages' is no argument of it"),
        ({"prompt": "a", "template": {"x": object()}}, "template cannot be written as JSON"),
        ({"prompt": "a", "system": 4}, "system is int"),
        (
            {"prompt": "a", "overflow": "drop"},
            "overflow is 'drop', expected 'error' or 'drop-oldest'",
        ),
        ({"prompt": "a", "overflow": None}, "overflow is None, expected"),
        (
            {"messages": [USER, call(), {"role": "tool", "content": "5", "tool_call_id": "1"}]},
            "not read 'tool_calls'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        make_session(TREE).chat(**given)


def test_tools_and_template_arguments_last_as_long_as_the_conversation() -> None:
    session = make_session(TREE)
    names = "{% for t in tools or [] %}{{ t.name }}{% endfor %}"
    template = names + TEMPLATE + "{% if think is false %}quick{% endif %}"
    format_ = ChatFormat(template, {"eos_token": "</s>"}, (0,)).framed()
    session.tokenizer = ChatTokenizer(session.tokenizer.tokenizer, format_)
    text = "".join(
        session.chat("a", tools=[{"name": "f"}], template={"think": False}, max_tokens=5)
    )
    written = "f<user>a</s><assistant>"
    assert text == truth(session, f"{written}quick", 5)
    written += f"{text}</s><user>b</s><assistant>"
    assert "".join(session.chat("b", max_tokens=5)) == truth(session, f"{written}quick", 5)
    session.reset()
    assert "".join(session.chat("a", max_tokens=5)) == truth(session, "<user>a</s><assistant>", 5)


def test_a_conversation_that_outgrows_the_context_is_an_error_or_loses_its_oldest_turns() -> None:
    session = make_session(TREE, context=100)
    for number in range(9):
        prompt = f"this is message {number}"
        if sum(len(message["content"]) + 9 for message in session.messages) > 50:
            break
        "".join(session.chat(prompt, system="Be brief.", max_tokens=8))
    before = session.messages
    with pytest.raises(ContextOverflowError, match="context of 100"):
        session.chat("x" * 60, max_tokens=8)
    text = "".join(session.chat("x" * 60, max_tokens=8, overflow="drop-oldest"))
    dropped = session.last.dropped
    assert dropped >= 1
    kept = [before[0], *before[1 + 2 * dropped :], {"role": "user", "content": "x" * 60}]
    assert session.messages == [*kept, {"role": "assistant", "content": text}]
    written = (
        "".join(f"<{message['role']}>{message['content']}</s>" for message in kept) + "<assistant>"
    )
    assert text == truth(session, written, 8)
    assert len(ids_of(session, written)) + 8 <= 100
    one_more = [before[0], *before[1 + 2 * (dropped - 1) :], kept[-1]]
    assert len(session.prompt_ids(messages=one_more)) + 8 > 100
    with pytest.raises(ContextOverflowError):  # the last turn is never dropped
        session.chat("x" * 600, max_tokens=8, overflow="drop-oldest")


def test_nothing_is_dropped_that_fits() -> None:
    session = make_session(TREE, context=100)
    messages = [USER, ANSWER, USER]
    "".join(session.chat(messages=messages, max_tokens=1000, overflow="drop-oldest"))
    assert session.last.dropped == 0 and session.messages[:3] == messages


async def _all(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


def test_answers_can_be_awaited() -> None:
    session = make_session(TREE)
    other = make_session(TREE)

    async def both() -> tuple[str, str]:
        return await _all(session.achat("a", max_tokens=9)), await _all(
            session.achat("b", max_tokens=9)
        )

    assert asyncio.run(both()) == (
        "".join(other.chat("a", max_tokens=9)),
        "".join(other.chat("b", max_tokens=9)),
    )
    assert asyncio.run(_all(session.agenerate("c", max_tokens=9))) == "".join(
        other.generate("c", max_tokens=9)
    )
    with pytest.raises(InputError, match="the prompt is empty"):
        asyncio.run(_all(session.achat(" ")))


def test_a_cancelled_task_cancels_its_answer_and_what_it_said_counts() -> None:
    session = make_session(TREE)

    async def cancelled() -> str:
        said = ""
        got = asyncio.Event()

        async def listen() -> None:
            nonlocal said
            async for piece in session.achat("hello", max_tokens=100):
                said += piece
                got.set()

        task = asyncio.create_task(listen())
        await got.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return said

    said = asyncio.run(cancelled())
    assert session.last.reason is Reason.CANCELLED
    assert session.messages[1]["content"].startswith(said)
    assert "".join(session.chat("b", max_tokens=9))


def test_a_task_that_is_cancelled_during_prefill_leaves_the_rest_of_the_prompt() -> None:
    session = make_session(TREE)
    conversation = session._conversation
    chunk = session.engine.geometry.chunk
    prefill = conversation.prefill
    going = threading.Event()
    left = threading.Event()
    cancel = session.cancel

    def slow(tokens: Sequence[int]) -> int:
        going.set()
        assert left.wait(30)
        return prefill(tokens)

    def leaves() -> None:
        cancel()
        left.set()

    async def cancelled() -> None:
        task = asyncio.create_task(_all(session.agenerate("x" * (3 * chunk), max_tokens=9)))
        await asyncio.to_thread(going.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(conversation, "prefill", slow)
        patched.setattr(session, "cancel", leaves)
        asyncio.run(cancelled())
    assert conversation.length == chunk and session.last.reason is Reason.CANCELLED


def test_of_two_answers_at_once_the_newer_one_goes_on() -> None:
    session = make_session(TREE)

    async def two() -> tuple[str, str]:
        first = session.agenerate("hello", max_tokens=30)
        second = session.agenerate("b", max_tokens=9)
        await anext(first)
        text = await _all(second)
        with pytest.raises(InputError, match="ended by a newer one"):
            await anext(first)
        return text, "".join(make_session(TREE).generate("b", max_tokens=9))

    text, alone = asyncio.run(two())
    assert text == alone


def test_a_closed_session_answers_no_more() -> None:
    session = make_session(TREE)

    async def closed() -> None:
        answer = session.achat("hello", max_tokens=30)
        await anext(answer)
        session.close()
        with pytest.raises(InputError, match="the session was closed"):
            await anext(answer)
        with pytest.raises(InputError, match="the session was closed"):
            await _all(session.achat("b"))

    asyncio.run(closed())
    with pytest.raises(InputError, match="the session was closed"):
        "".join(session.chat("b"))
