"""Frames give what jinja2 renders as transformers calls it, and only templates that are no more
become frames.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssdevice.errors import ConfigError, InputError
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
from ssdevice.text.frames import NO_CONVERSATIONS, NO_PROMPTS, Frame, Frames, Trim
from tests.text.families import (
    HIDDEN,
    MORE,
    MORE_NAMES,
    NO_SYSTEM,
    ONE_QUESTION,
    PLACES,
    TRIMS,
    WHOLE,
)
from tests.text.test_tokenizer import NAMED, TOKENIZERS, write_folder

TEXTS = (
    "hi",
    "  both \t",
    "\n\nlines\n\nand\r\n",
    "\u00a0odd\u2003",
    "<think>\nso\n</think>\n\nyes",
    "{{ x }}",
)
SYSTEMS = (None, "", "Be brief.", " \nBe brief. \n", "no /no_think")


def conversations() -> list[list[dict[str, str]]]:
    """One to three turns of every text, ended by either role, with and without a system message."""
    found = []
    for system in SYSTEMS:
        start = [] if system is None else [{"role": "system", "content": system}]
        for at, text in enumerate(TEXTS):
            said = [text, TEXTS[at - 1], text, (" ", "")[at % 2], TEXTS[at - 2]]
            talk = [
                {"role": ("user", "assistant")[i % 2], "content": content}
                for i, content in enumerate(said)
            ]
            found += [[*start, *talk[:size]] for size in range(1, 6)]
    return found


def framed(template: str, **variables: Any) -> ChatFormat:
    return ChatFormat(template, NAMED, (1,), variables).framed()


def as_jinja2(folder: Path, template: str) -> Any:
    """What transformers makes of messages with a template; None where that refuses."""
    transformers = pytest.importorskip("transformers", reason="the reference for chat templates")
    folder = write_folder(folder, TOKENIZERS["byte_level"], template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    errors = pytest.importorskip("jinja2").TemplateError

    def render(messages: list[dict[str, str]], opened: bool) -> str | None:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=opened
                )
            )
        except errors:
            return None

    return render


def joined(chat: ChatFormat, messages: list[dict[str, str]], opened: bool) -> str | None:
    assert chat.frames is not None
    try:
        return chat.frames.render(messages, add_generation_prompt=opened)
    except ConfigError:
        return None


@pytest.mark.parametrize("name", WHOLE)
def test_frames_give_the_texts_of_their_template(tmp_path: Path, name: str) -> None:
    chat = framed(WHOLE[name])
    render = as_jinja2(tmp_path, WHOLE[name])
    kept = (WHOLE[name], NAMED) if name in MORE_NAMES else (None, {})
    assert (
        (chat.template, chat.special_tokens) == kept
        and chat.note is None
        and isinstance(chat.writer, Frames)
    )
    refused = 0
    for messages in conversations():
        ended = messages[-1]["role"] == "assistant"
        for opened in (False,) if ended else (False, True):
            wanted = render(messages, opened)
            assert joined(chat, messages, opened) == wanted, messages
            refused += wanted is None
    assert (refused > 0) == (name in NO_SYSTEM)


@pytest.mark.parametrize("name", WHOLE)
def test_frames_know_what_templates_strip_and_refuse(name: str) -> None:
    frames = framed(WHOLE[name]).frames
    assert frames is not None and frames.empty_system == (name != "phi3")
    first = frames.first.trim
    after = frames.after_system and frames.after_system.trim
    assert (first, after) == TRIMS.get(name, (Trim.NONE, None if name in NO_SYSTEM else Trim.NONE))
    assert (frames.system is None) == (frames.after_system is None) == (name in NO_SYSTEM)


@pytest.mark.parametrize("name", ONE_QUESTION)
def test_a_template_that_changes_earlier_messages_is_kept_with_frames_for_one(
    tmp_path: Path, name: str
) -> None:
    template = ONE_QUESTION[name]
    chat = framed(template)
    render = as_jinja2(tmp_path, template)
    writer = chat.writer
    assert (
        chat.template == template and chat.special_tokens == NAMED and chat.note == NO_CONVERSATIONS
    )
    for messages in conversations():
        wanted = render(messages, True)
        if (
            sum(message["role"] == "user" for message in messages) == 1
            and messages[-1]["role"] == "user"
        ):
            assert joined(chat, messages, True) == wanted
        elif messages[-1]["role"] == "user":
            assert joined(chat, messages, True) is None
            assert writer.render(messages, add_generation_prompt=True) == wanted


@pytest.mark.parametrize("name", MORE)
def test_a_template_that_looks_into_messages_or_writes_dates_has_no_frames(name: str) -> None:
    chat = framed(MORE[name])
    assert (chat.template, chat.frames, chat.note) == (MORE[name], None, NO_PROMPTS)


@pytest.mark.parametrize("name", HIDDEN)
def test_a_template_that_looks_where_no_trial_does_has_no_frames(tmp_path: Path, name: str) -> None:
    """Found in its syntax tree, also through variables, macros and blocks."""
    chat = framed(HIDDEN[name])
    assert (chat.template, chat.frames, chat.note) == (HIDDEN[name], None, NO_PROMPTS)
    render = as_jinja2(tmp_path, HIDDEN[name])
    for content in ("42", "A" * 60 + "q", "a\n" * 9, "word " * 2000, "zzzzz", "fgh"):
        messages = [{"role": "user", "content": content}]
        written = chat.writer.render(messages, add_generation_prompt=True)
        assert written == render(messages, True)


@pytest.mark.parametrize("name", PLACES)
def test_a_template_that_counts_messages_has_frames_for_one_question(
    tmp_path: Path, name: str
) -> None:
    chat = framed(PLACES[name])
    assert chat.template == PLACES[name] and chat.note == NO_CONVERSATIONS
    render = as_jinja2(tmp_path, PLACES[name])
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": f"word {i}"} for i in range(87)]
    for messages in (talk[:1], talk):
        written = chat.writer.render(messages, add_generation_prompt=True)
        assert written == render(messages, True)


def test_variables_of_the_export_are_in_the_frames() -> None:
    template = (
        WHOLE["chatml"]
        + "{% if add_generation_prompt and not thinking %}{{ '<think></think>' }}{% endif %}"
    )
    frames = framed(template, thinking=False).frames
    assert frames is not None and frames.answer == "<|im_start|>assistant\n<think></think>"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", ["smollm2", "llama2", "gemma3", "mistral"])
def test_ids_of_prompts_with_an_instruction_are_those_of_transformers(
    tmp_path: Path, name: str, tokenizer: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference for chat templates")
    folder = write_folder(tmp_path, TOKENIZERS[tokenizer], WHOLE[name])
    chat = open_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert chat.chat.template is None
    for text in ("hi", "  both \n", "a\n\nb"):
        for instruction in ("", "Be brief.", "  Be\nbrief. "):
            message = {"role": "user", "content": f"{instruction}\n{text}" if instruction else text}
            wanted = theirs.apply_chat_template([message], add_generation_prompt=True)["input_ids"]
            assert chat.prompt_ids(text, instruction=instruction) == list(wanted)


@pytest.mark.parametrize(
    "roles", ["assistant", "user user", "system system", "system assistant", "user tool"]
)
def test_messages_in_another_order_are_refused(roles: str) -> None:
    frames = framed(WHOLE["chatml"]).frames
    assert frames is not None
    messages = [{"role": role, "content": "x"} for role in roles.split()]
    with pytest.raises(
        ConfigError, match="takes no (assistant|user|system|tool) message as message [12] of a"
    ):
        frames.render(messages, add_generation_prompt=True)


def test_what_templates_treat_differently_is_refused() -> None:
    frames = framed(WHOLE["llama2"]).frames
    assert frames is not None
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " \n"}]
    with pytest.raises(InputError, match="message 2 of the conversation is empty"):
        frames.render(talk, add_generation_prompt=True)
    with pytest.raises(ConfigError, match="does not end with its system message"):
        frames.render(talk[:1], add_generation_prompt=True)


def test_a_format_needs_frames_of_conversations_or_a_template() -> None:
    one = Frames(Frame("", ""), None, None, None, None, "")
    assert isinstance(ChatFormat("x", {}, (1,), {}, one).writer, ChatTemplate)
    for frames in (None, one):
        with pytest.raises(ConfigError, match="no template, and no frames of whole conversations"):
            ChatFormat(None, {}, (1,), {}, frames)


def test_stored_frames_are_read_as_they_were_written() -> None:
    from ssdevice.config import load_strict, to_json

    for template in WHOLE.values():
        chat = framed(template)
        assert load_strict(ChatFormat, json.loads(json.dumps(to_json(chat))), "chat") == chat
