"""Tokenizers of folders as they really are: special tokens in any file, adapters with their own,
damaged ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from tokenizers import Tokenizer, normalizers

from ssdevice.errors import ConfigError
from ssdevice.model.tokenizer import (
    OTHER_FORMAT,
    difference,
    open_tokenizer,
    shared_tokenizer,
    tokenizer_folder,
)
from ssdevice.text.tokenizer import ChatTokenizer
from tests.text.test_tokenizer import CHATML, NAMED, TOKENIZERS, as_transformers, write_folder

AutoTokenizer: Any = pytest.importorskip("transformers").AutoTokenizer

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
NEW = "<|new|>"
TOOL = "<tool>"
FLAGS: tuple[dict[str, bool], ...] = (
    {"special": True},
    {"special": False},
    {"special": True, "lstrip": True},
    {"special": True, "rstrip": True},
    {"special": True, "lstrip": True, "rstrip": True, "normalized": True},
    {"special": False, "single_word": True},
    {"special": False, "normalized": True, "rstrip": True},
)


def token(content: str, **flags: bool) -> dict[str, Any]:
    whole = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **whole, **flags}


def places(size: int, **flags: bool) -> dict[str, dict[str, Any]]:
    """Where a token can stand -> the JSON files that say so.

    ``size``: tokens in ``tokenizer.json``.
    """
    named = {name: flag for name, flag in token(NEW, **flags).items() if name != "special"}
    decoder = {"added_tokens_decoder": {str(size): token(NEW, **flags)}}
    marks = {
        "added_tokens_decoder": {
            "3": token("<|im_start|>", **flags),
            str(size - 1): token(TOOL, **flags),
        }
    }
    return {
        "added_tokens_decoder": {"tokenizer_config": {**CONFIG, **decoder}},
        "flags of tokens of tokenizer.json": {"tokenizer_config": {**CONFIG, **marks}},
        "a named token": {
            "tokenizer_config": {
                **CONFIG,
                "pad_token": {"__type": "AddedToken", **token(NEW, **flags)},
            }
        },
        "special_tokens_map.json": {
            "tokenizer_config": CONFIG,
            "special_tokens_map": {"unk_token": named},
        },
        "special_tokens_map.json, an end": {
            "tokenizer_config": {},
            "special_tokens_map": {"eos_token": named},
        },
        "a name of its own": {"tokenizer_config": {**CONFIG, "image_token": NEW}},
        "a named token that is a word": {"tokenizer_config": {**CONFIG, "sep_token": "th"}},
        "additional_special_tokens": {
            "tokenizer_config": {**CONFIG, "additional_special_tokens": [NEW, "<s>"]}
        },
        "extra_special_tokens, a list": {
            "tokenizer_config": {**CONFIG, "extra_special_tokens": [NEW]}
        },
        "extra_special_tokens, a table": {
            "tokenizer_config": {**CONFIG, "extra_special_tokens": {"new_token": NEW}}
        },
        "special_tokens_map.json, a list": {
            "tokenizer_config": CONFIG,
            "special_tokens_map": {"additional_special_tokens": [NEW]},
        },
        "special_tokens_map.json against the configuration": {
            "tokenizer_config": {**CONFIG, "pad_token": "<s>"},
            "special_tokens_map": {"pad_token": NEW},
        },
        "added_tokens.json": {"tokenizer_config": CONFIG, "added_tokens": {NEW: size}},
    }


WITH_FLAGS = 5
"""The first places can give flags to a token."""


def cases() -> Iterator[ParameterSet]:
    """A token in every place, with flags where a place can give them."""
    for number, place in enumerate(places(0)):
        for flags in FLAGS if number < WITH_FLAGS else FLAGS[:1]:
            said = "-".join(f"{name}={flag:d}" for name, flag in flags.items())
            yield pytest.param(place, flags, id=f"{place}-{said}")


CASES = list(cases())


def assert_as_transformers(
    chat: ChatTokenizer, folder: Path, marks: tuple[str, ...] = (NEW,)
) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    for mark in marks:
        for text in (
            mark,
            f"the {mark} answer{mark}the\n{mark}\n  {mark}  ",
            f"x{mark}y",
            f"a {mark.upper()} b",
            "the",
        ):
            ids = reference.encode(text, add_special_tokens=False)
            assert chat.encode(text) == ids
            assert chat.decode(ids) == reference.decode(ids, skip_special_tokens=True)
            stream = chat.stream()
            assert stream.push(ids) + stream.flush() == reference.decode(
                ids, skip_special_tokens=True
            )
            if chat.chat.template is not None:
                prompt = as_transformers(folder, [{"role": "user", "content": text}], True)
                assert chat.prompt_ids(text) == prompt


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("place", "flags"), CASES)
def test_special_tokens_of_any_file_are_those_of_transformers(
    tmp_path: Path, name: str, place: str, flags: dict[str, bool]
) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS[name].to_str())
    tokenizer.add_tokens([TOOL])
    files = places(tokenizer.get_vocab_size(), **flags)[place]
    folder = write_folder(
        tmp_path, tokenizer, "{{ eos_token }}{{ new_token }}{{ image_token }}" + CHATML, **files
    )
    chat = open_tokenizer(folder)
    changed = {
        "flags of tokens of tokenizer.json": ("<|im_start|>", TOOL),
        "a named token that is a word": ("th",),
    }
    marks = changed.get(place, (NEW,))
    assert all(len(chat.encode(mark)) == 1 for mark in marks)
    assert_as_transformers(chat, folder, (*marks, "<|im_start|>"))
    assert_as_transformers(ChatTokenizer.from_bytes(chat.tokenizer_json, chat.chat), folder, marks)


def llama(folder: Path, **config: Any) -> Path:
    """A folder as Llama 2 and TinyLlama have it: each text begins with a space, also behind special
    tokens.
    """
    tokenizer = Tokenizer.from_str(TOKENIZERS["byte_fallback"].to_str())
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return write_folder(
        folder, tokenizer, CHATML, tokenizer_config={"tokenizer_class": "LlamaTokenizer", **config}
    )


def test_texts_are_split_as_tokenizer_json_was_saved(tmp_path: Path) -> None:
    folder = llama(tmp_path, legacy=False, **NAMED, extra_special_tokens=[NEW])
    chat = open_tokenizer(folder)
    spaces = [chat.tokenizer.id_to_token(i) for i in chat.prompt_ids(f"a{NEW}a")].count("▁")
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.add_special_tokens([NEW])
    text = f"<|im_start|>user\na{NEW}a<|im_end|>\n<|im_start|>assistant\n"
    assert chat.prompt_ids(f"a{NEW}a") == saved.encode(text, add_special_tokens=False).ids
    assert spaces > 0
    assert (
        type(AutoTokenizer.from_pretrained(folder)).__name__ == "LlamaTokenizer"
    )  # which would drop the spaces
    assert open_tokenizer(llama(tmp_path, legacy=True, **NAMED)).prompt_ids("a") == chat.prompt_ids(
        "a"
    )


def test_names_that_only_a_class_knows_reach_the_template(tmp_path: Path) -> None:
    folder = llama(tmp_path, legacy=True)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHATML)
    chat = open_tokenizer(folder)
    assert chat.prompt_ids("a")[0] == chat.tokenizer.token_to_id("<s>")
    assert chat.prompt_ids("a") == as_transformers(folder, [{"role": "user", "content": "a"}], True)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"split_special_tokens": True}, "'split_special_tokens' would read the marks"),
        (
            {
                "clean_up_tokenization_spaces": True,
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
            },
            "'clean_up_tokenization_spaces' takes back spaces",
        ),
    ],
)
def test_options_that_a_bundle_cannot_hold_are_refused(
    tmp_path: Path, option: dict[str, bool], message: str
) -> None:
    folder = write_folder(
        tmp_path, TOKENIZERS["byte_level"], CHATML, tokenizer_config={**CONFIG, **option}
    )
    with pytest.raises(ConfigError, match=message):
        open_tokenizer(folder)


def test_options_without_effect_are_taken(tmp_path: Path) -> None:
    harmless = {
        "clean_up_tokenization_spaces": True,
        "add_bos_token": True,
        "add_prefix_space": False,
        "legacy": True,
    }
    folder = write_folder(
        tmp_path, TOKENIZERS["byte_level"], CHATML, tokenizer_config={**CONFIG, **harmless}
    )
    assert_as_transformers(open_tokenizer(folder), folder, ("<s>",))


# Adapters.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "model", TOKENIZERS["byte_level"], CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    return folder


def adapter(folder: Path, template: str = CHATML, **files: Any) -> Path:
    """An adapter's folder as trainers save it, with the tokenizer."""
    return write_folder(folder, TOKENIZERS["byte_level"], template, **files)


SHOUTING = CHATML.replace("'<|im_start|>' + message.role", "'<|im_start|>' + message.role | upper")


def test_an_adapter_brings_its_tokenizer_and_template(model: Path, tmp_path: Path) -> None:
    config = {
        "tokenizer_config": {**CONFIG, "eos_token": "<|eot_id|>", "extra_special_tokens": [NEW]}
    }
    own = adapter(tmp_path / "own", SHOUTING, **config)
    chat = open_tokenizer(model, own)
    assert_as_transformers(chat, own)
    end = chat.tokenizer.token_to_id("<|eot_id|>")
    turn = chat.tokenizer.token_to_id("<|im_end|>")
    assert chat.stop_ids == (5, end, turn)  # the model's, the adapter's and the template's
    (tmp_path / "bare").mkdir()
    assert difference(open_tokenizer(model, tmp_path / "bare"), open_tokenizer(model)) is None


def test_a_part_of_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json", "added_tokens.json"):
        part = tmp_path / name
        part.mkdir()
        (part / name).write_text("{}")
        with pytest.raises(
            ConfigError, match=rf"{name} without tokenizer\.json is a part of a tokenizer"
        ):
            tokenizer_folder(model, part)


def test_apps_of_a_bundle_share_one_tokenizer_or_are_refused(model: Path, tmp_path: Path) -> None:
    vocab = TOKENIZERS["byte_level"].get_vocab_size()
    (tmp_path / "bare").mkdir()
    one, twin, same = (adapter(tmp_path / name, SHOUTING) for name in ("one", "twin", "same"))
    shutil.copyfile(model / "chat_template.jinja", same / "chat_template.jinja")
    assert shared_tokenizer(model, [None], vocab)[1:] == (model, ())
    assert shared_tokenizer(model, [tmp_path / "bare", None], vocab)[1:] == (model, ())
    assert shared_tokenizer(model, [same, tmp_path / "bare", None], vocab)[1:] == (same, ())
    assert shared_tokenizer(model, [one], vocab)[1:] == (one, ())
    tokenizer, folder, notes = shared_tokenizer(model, [one, twin, None], vocab)
    assert (folder, notes) == (one, (OTHER_FORMAT,))
    assert "USER" in tokenizer.tokenizer.decode(tokenizer.prompt_ids("hi"))
    for other in (same, tmp_path / "bare"):
        with pytest.raises(
            ConfigError,
            match="need different chat templates, and a bundle has one: export them apart",
        ):
            shared_tokenizer(model, [one, other, None], vocab)
    new = adapter(tmp_path / "new", tokenizer_config={**CONFIG, "pad_token": NEW})
    with pytest.raises(ConfigError, match="need different tokenizers"):
        shared_tokenizer(model, [same, new], vocab)
    ends = adapter(tmp_path / "ends", tokenizer_config={**CONFIG, "eos_token": "<|eot_id|>"})
    for pair in ([same, ends], [ends, same]):
        with pytest.raises(ConfigError, match="need different tokens that end answers"):
            shared_tokenizer(model, pair, vocab)


def test_tokens_that_the_model_does_not_have_are_refused(model: Path, tmp_path: Path) -> None:
    vocab = TOKENIZERS["byte_level"].get_vocab_size()
    config = {"tokenizer_config": {**CONFIG, "extra_special_tokens": [NEW]}}
    own = adapter(tmp_path / "own", NEW + CHATML, **config)
    with pytest.raises(
        ConfigError, match=rf"own: the chat format uses token '<\|new\|>' with id {vocab}"
    ):
        shared_tokenizer(model, [own], vocab)
    assert shared_tokenizer(model, [own], vocab + 1)[1] == own
    (model / "generation_config.json").write_text("{}")
    never = adapter(
        tmp_path / "never", "{{ messages[-1].content }}", tokenizer_config={"eos_token": NEW}
    )
    with pytest.raises(ConfigError, match="no token that ends an answer is among"):
        shared_tokenizer(model, [never], vocab)
