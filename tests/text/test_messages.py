"""Conversations with tools and template arguments have the ids that transformers gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdevice.config import load_strict, to_json
from ssdevice.errors import ConfigError, InputError
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
from ssdevice.text.frames import Frames
from ssdevice.text.messages import Chat, arguments_object, checked, requested, with_arguments
from ssdevice.text.tokenizer import ChatTokenizer
from tests.text.families import (
    GEMMA,
    MORE,
    ONE_QUESTION,
    QWEN3,
    WHOLE,
    WITH_TEXT_ARGUMENTS,
    WITH_TOOLS,
)
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


@pytest.mark.parametrize("text", ['{"city":  "Oslo"}', "{}", '{"city": "Z\\u00fcrich"}'])
@pytest.mark.parametrize("template", WITH_TEXT_ARGUMENTS.values(), ids=WITH_TEXT_ARGUMENTS)
def test_templates_that_join_arguments_get_their_text(
    tmp_path: Path, template: str, text: str
) -> None:
    """As it was sent; of an object, its JSON."""
    chat, reference = opened(tmp_path, template)

    def talk(arguments: Any, content: str = "") -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": content, "tool_calls": [call]}
        return [USER, said, {"role": "tool", "content": "rain", "tool_call_id": "1"}]

    for as_text in (False, True):
        ids = chat.chat_ids(Chat(checked(talk(text))), as_text=as_text)
        assert ids == theirs(reference, talk(text))
    given = json.loads(text)
    written = json.dumps(given, ensure_ascii=False)
    assert chat.chat_ids(Chat(checked(talk(given)))) == theirs(reference, talk(written))


def test_arguments_that_a_message_repeats_as_python_does_are_no_sign(tmp_path: Path) -> None:
    chat, reference = opened(tmp_path, WITH_TOOLS["hermes"])
    said = [USER, *CALLED[1:2], {**CALLED[2], "content": str(CALL["function"]["arguments"])}]  # type: ignore[index]
    assert chat.chat_ids(Chat(checked(said))) == theirs(reference, said)


@pytest.mark.parametrize("given", [None, "", " "])
def test_no_arguments_are_an_empty_object(given: Any) -> None:
    calls = [{"function": {"name": "now", "arguments": given}}]
    said = [USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": ""}]
    assert checked(said)[1]["tool_calls"][0]["function"]["arguments"] == {}


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


def with_two(folder: Path, form: str, default: str) -> tuple[ChatTokenizer, Any]:
    """A model with a template of its own for tools, in each of the forms that transformers reads."""
    tokenizer = TOKENIZERS["byte_level"]
    if form == "list":
        named = [
            {"name": "default", "template": default},
            {"name": "tool_use", "template": WITH_TOOLS["hermes"]},
        ]
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
        config["chat_template"] = named  # type: ignore[assignment]
        write_folder(folder, tokenizer, None, tokenizer_config=config)
    else:
        write_folder(folder, tokenizer, default)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS["hermes"])
    ours = open_tokenizer(folder)
    stored = load_strict(ChatFormat, json.loads(json.dumps(to_json(ours.chat))), "chat")
    return ChatTokenizer.from_bytes(ours.tokenizer_json, stored), AutoTokenizer.from_pretrained(
        folder
    )


@pytest.mark.parametrize("default", ["chatml", "qwen2.5"])
@pytest.mark.parametrize("form", ["list", "folder"])
def test_conversations_with_tools_have_the_template_that_transformers_takes(
    tmp_path: Path, form: str, default: str
) -> None:
    """Also where the other template would write tools, or is kept as frames."""
    chat, reference = with_two(tmp_path, form, WHOLE[default])
    for talk in {**TALKS, **CALLS}.values():
        for as_text in (False, True):
            ids = chat.chat_ids(Chat(checked(talk), (TOOL,)), as_text=as_text)
            assert ids == theirs(reference, talk, tools=[TOOL])
    for talk in TALKS.values():
        assert chat.chat_ids(Chat(checked(talk))) == theirs(reference, talk)
    assert chat.chat.for_tools == WITH_TOOLS["hermes"]
    assert (chat.chat.template is None) == (default == "chatml")
