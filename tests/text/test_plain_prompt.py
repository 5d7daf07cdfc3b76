"""A model without a chat template: its prompts have the ids that transformers' tokenizer gives the
text itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from ssdevice.errors import ConfigError
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.tokenizer import ChatTokenizer
from tests.text.test_tokenizer import TEXTS, TOKENIZERS, write_folder


def with_marks(tokenizer: Tokenizer, form: str) -> Tokenizer:
    """A copy that puts special tokens around a text, as ``form`` says."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    marks = [(name, copy.token_to_id(name)) for name in form.split() if name != "$A"]
    if marks:
        copy.post_processor = processors.TemplateProcessing(single=form, special_tokens=marks)
    return copy


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("form", ["$A", "<s> $A", "<|im_start|> <s> $A", "<s> $A </s>"])
def test_ids_are_those_of_the_text(tmp_path: Path, tokenizer: str, form: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference for the ids of a text")
    folder = write_folder(tmp_path, with_marks(TOKENIZERS[tokenizer], form), None)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    chat = open_tokenizer(folder)
    assert chat.plain
    again = ChatTokenizer.from_bytes(chat.tokenizer_json, chat.chat)
    end = theirs.convert_tokens_to_ids("</s>")
    for text in TEXTS:
        wanted = theirs(f"Be brief.\n{text}")["input_ids"]
        wanted = (
            wanted[:-1] if wanted[-1] == end else wanted
        )  # the model goes on where the text ends
        assert chat.prompt_ids(text, instruction="Be brief.") == wanted
        assert again.prompt_ids(text, system="Be brief.") == wanted
        assert chat.prompt_ids(text) == [i for i in theirs(text)["input_ids"] if i != end]


def test_answers_follow_their_prompt_and_end_with_the_stop_token(tmp_path: Path) -> None:
    tokenizer = with_marks(TOKENIZERS["byte_level"], "<s> $A")
    chat = open_tokenizer(write_folder(tmp_path, tokenizer, None))
    end = tokenizer.token_to_id("</s>")
    assert chat.stop_ids == (end,)
    for answer in (" the answer", "\n你好", "x"):
        ids = chat.completion_ids(answer)
        assert ids[-1] == end and chat.decode(ids) == answer
    with pytest.raises(ConfigError, match="does not end a user's turn"):
        chat.user_opening()


def test_a_conversation_is_one_text(tmp_path: Path) -> None:
    chat = open_tokenizer(write_folder(tmp_path, TOKENIZERS["byte_level"], None))
    turns = (("system", "be brief"), ("user", "one,"), ("assistant", " two"), ("user", "three,"))
    messages = [{"role": role, "content": words} for role, words in turns]
    assert (
        chat._template.render(messages, add_generation_prompt=True) == "be brief\none, two\nthree,"
    )


def test_a_beginning_that_no_template_can_write_is_refused(tmp_path: Path) -> None:
    tokenizer = with_marks(TOKENIZERS["byte_level"], "$A")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="the $A", special_tokens=[("the", 11)]
    )
    with pytest.raises(ConfigError, match=r"none can be made .* write the model's prompt format"):
        open_tokenizer(write_folder(tmp_path, tokenizer, None))
