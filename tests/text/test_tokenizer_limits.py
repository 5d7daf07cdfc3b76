"""Tokenizers that come with a bundle fill no memory, and what their library gives up is one error."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ssdevice.errors import ConfigError, InputError
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tokenizer_limits import MAX_GROWTH
from tests.runtime.scripted import make_tokenizer

CHAT = ChatFormat("{{ messages[0].content }}", {}, (0,))
NEVER_FOUND = "(a|a|aa)+b"
"""A regular expression that the library gives up on a row of a."""


def opened(**parts: Any) -> ChatTokenizer:
    """The tokenizer of a bundle with other parts, as JSON or as the library's objects."""
    document = json.loads(make_tokenizer().tokenizer_json)
    for name, part in parts.items():
        document[name] = part if isinstance(part, dict) else json.loads(part.__getstate__())
    return ChatTokenizer.from_bytes(json.dumps(document).encode(), CHAT)


def charsmap(*texts: bytes) -> dict[str, str]:
    """A table of characters without an entry, and the texts that entries could lead to."""
    table = (1 << 10).to_bytes(4, "little") + bytes(1 << 10) + b"".join(text + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 4)},
        {"normalizer": normalizers.Sequence([normalizers.Sequence([normalizers.Replace("ab", "b" * 9)] * 3)] * 2)},
        {"normalizer": normalizers.Replace(Regex("(?=a)"), "x" * MAX_GROWTH)},
        {"normalizer": normalizers.Replace("", "x" * MAX_GROWTH)},
        {"normalizer": normalizers.Prepend("x" * MAX_GROWTH)},
        {"normalizer": charsmap(b"x", b"y" * (MAX_GROWTH + 1))},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 11)},
        {"decoder": decoders.Sequence([decoders.BPEDecoder(suffix="")] * 11)},
        {"decoder": decoders.Replace("a", "a" * (MAX_GROWTH + 1))},
        {"post_processor": processors.TemplateProcessing(" ".join(["$A"] * (MAX_GROWTH + 1)))},
    ],
)
def test_what_could_fill_the_memory_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer.json: its steps can make a text more than {MAX_GROWTH} times"):
        opened(**parts)


@pytest.mark.parametrize(
    "parts",
    [
        {
            "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        },
        {"normalizer": normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁")])},
        {"normalizer": charsmap(b"y" * 36), "pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(), "decoder": decoders.ByteLevel()},
        {"normalizer": normalizers.BertNormalizer(), "decoder": decoders.WordPiece()},
    ],
)
def test_steps_of_models_are_taken(parts: dict[str, Any]) -> None:
    assert opened(**parts).encode("abc")


def test_an_expression_on_which_the_library_gives_up_is_one_error() -> None:
    tokenizer = opened(normalizer=normalizers.Replace(Regex(NEVER_FOUND), ""))
    with pytest.raises(InputError, match="^the tokenizer cannot encode the prompt: Onig"):
        tokenizer.encode("a" * 60)
    assert tokenizer.encode("b")


def test_an_expression_of_the_decoder_on_which_the_library_gives_up_is_one_error() -> None:
    library = Tokenizer(models.WordLevel({"a" * 60: 0, "b": 1}, unk_token="b"))
    library.decoder = decoders.Replace(Regex(NEVER_FOUND), "")
    tokenizer = ChatTokenizer(library, CHAT)
    for decode in (tokenizer.decode, tokenizer.stream().push):
        with pytest.raises(InputError, match="^the tokenizer cannot decode the answer: Onig"):
            decode([0])
