"""Conversations with tools and template arguments have the ids that transformers gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdevice.errors import ConfigError, InputError
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.chat_template import ChatTemplate
from ssdevice.text.frames import Frames
from ssdevice.text.messages import Chat, arguments_object, checked, requested, with_arguments
from ssdevice.text.tokenizer import ChatTokenizer
from tests.text.families import GEMMA, MORE, ONE_QUESTION, QWEN3, WHOLE, WITH_TOOLS
from tests.text.test_tokenizer import TOKENIZERS, write_folder

AutoTokenizer: Any = pytest.importorskip(
    "transformers", reason="the reference for chat templates"
).AutoTokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a \"city\" <now> & 'then', 你好.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1.5}},
}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
USER = {"role": "user", "content": "How is it?"}
ANSWER = {"role": "assistant", "content": "<think>\nso\n</think>\n\nFine. "}
CALLED = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "blue"}'},
]
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "three": [USER, ANSWER, USER],
    "five": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
}
CALLS = {"called": CALLED, "then": [SYSTEM, *CALLED, ANSWER, USER]}


def opened(folder: Path, template: str) -> tuple[ChatTokenizer, Any]:
    """Our tokenizer as a bundle keeps it, and that of transformers."""
    folder = write_folder(folder, TOKENIZERS["byte_level"], template)
    ours = open_tokenizer(folder)
    return ChatTokenizer.from_bytes(ours.tokenizer_json, ours.chat), AutoTokenizer.from_pretrained(
        folder
    )


def theirs(tokenizer: Any, messages: list[dict[str, Any]], **given: Any) -> list[int]:
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, **given)["input_ids"]
    )


@pytest.mark.parametrize("name", [*WHOLE, *ONE_QUESTION, "smollm3", *WITH_TOOLS])
def test_a_conversation_has_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    chat, reference = opened(tmp_path, {**MORE, **ONE_QUESTION, **WHOLE, **WITH_TOOLS}[name])
    for talk in TALKS.values():
        try:
            ids = chat.chat_ids(Chat(checked(talk)))
        except ConfigError as error:
            assert name in ("gemma", "mistral") and "system" in str(error)
            continue
        assert ids == theirs(reference, talk)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_and_calls_have_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    chat, reference = opened(tmp_path, WITH_TOOLS[name])
    for talk in {**TALKS, **CALLS}.values():
        for tools in ([], [TOOL], [TOOL, {**TOOL, "x": None}]):
            given = {"tools": tools} if tools else {}
            assert chat.chat_ids(Chat(checked(talk)).given(tools, None)) == theirs(
                reference, talk, **given
            )


@pytest.mark.parametrize(
    ("template", "given"),
    [
        (QWEN3, {"enable_thinking": False}),
        (QWEN3, {"enable_thinking": True}),
        (MORE["smollm3"], {"enable_thinking": False}),
        (WITH_TOOLS["hermes"], {"enable_thinking": False}),
        (WITH_TOOLS["llama3"], {"date_string": "1 May 2026"}),
    ],
)
def test_template_arguments_have_the_ids_of_transformers(
    tmp_path: Path, template: str, given: dict[str, Any]
) -> None:
    chat, reference = opened(tmp_path, template)
    for talk in TALKS.values():
        assert chat.chat_ids(Chat(checked(talk)).given((), given)) == theirs(
            reference, talk, **given
        )
    with pytest.raises(
        InputError, match=f"does not read 'enable_thinkin'; it reads .*{next(iter(given))}"
    ):
        chat.chat_ids(Chat((USER,)).given((), {"enable_thinkin": False}))


def test_calls_are_taken_as_openai_sends_them_and_written_as_templates_expect_them() -> None:
    function = {"name": "weather", "arguments": json.dumps(CALL["function"]["arguments"])}  # type: ignore[index]
    sent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    said = checked([USER, sent, CALLED[2]])
    assert said[1]["tool_calls"][0]["function"]["arguments"] == function["arguments"]
    assert with_arguments(said[1], arguments_object) == CALLED[1]
    no_arguments = {**sent, "tool_calls": [{"function": {"name": "now"}}]}
    called = checked([USER, no_arguments, {"role": "tool", "content": ""}])[1]
    assert called["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


NAMED = """{% for m in messages %}{{ '<|im_start|>' + m.role + (m.name or '') + m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""


@pytest.mark.parametrize("template", [*WHOLE.values(), WITH_TOOLS["hermes"], QWEN3, NAMED])
def test_a_name_is_written_where_the_template_reads_it_and_nowhere_else(
    tmp_path: Path, template: str
) -> None:
    chat, reference = opened(tmp_path, template)
    named = [{**USER, "name": "ann"}, {**ANSWER, "name": "bob"}, {**USER, "name": "ann"}]
    ids = chat.chat_ids(Chat(checked(named)))
    assert ids == theirs(reference, named)
    assert (ids != chat.chat_ids(Chat(checked(TALKS["three"])))) == (template is NAMED)


def test_a_template_that_reads_more_is_kept_and_frames_write_what_they_can(tmp_path: Path) -> None:
    chat, _ = opened(tmp_path / "hermes", WITH_TOOLS["hermes"])
    assert (
        chat.chat.template is not None
        and isinstance(chat.chat.writer, Frames)
        and chat.chat.note is None
    )
    chat.chat_ids(Chat((USER,)))
    assert "_full" not in vars(chat)  # no process was started
    broken = ChatTokenizer(chat.tokenizer, replace(chat.chat, template="{% if %}"))
    assert broken.chat_ids(Chat((USER,))) == chat.chat_ids(Chat((USER,)))
    with pytest.raises(ConfigError, match="the chat template cannot be used"):
        broken.chat_ids(Chat((USER,)).given([TOOL], None))
    gemma, _ = opened(tmp_path / "gemma", GEMMA)
    assert gemma.chat.template is None
    for given in (
        Chat((USER,)).given([TOOL], None),
        Chat((USER,)).given((), {"x": 1}),
        Chat(tuple(CALLED)),
    ):
        with pytest.raises(InputError, match="there are no tools and no template arguments"):
            gemma.chat_ids(given)
    qwen3, _ = opened(tmp_path / "qwen3", QWEN3)
    assert isinstance(qwen3.chat.writer, ChatTemplate)
    with pytest.raises(InputError, match="does not read 'tool_calls'"):
        qwen3.chat_ids(Chat(tuple(CALLED)))


def test_what_is_not_given_again_lasts() -> None:
    chat = Chat().given([TOOL], {"x": 1}).instructed("Be brief.").asked("a").then("assistant", "b")
    after = requested(chat, "c", None, None, (), None)
    assert (after.tools, after.template, len(after.messages)) == ((TOOL,), {"x": 1}, 4)
    assert requested(chat, "c", None, None, (), {}).template == {}
    assert requested(chat, None, [USER], None, (), None) == Chat((USER,))
