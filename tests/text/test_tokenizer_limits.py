"""Tokenizers that come with a bundle fill no memory, and what their library gives up is one error."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ssdevice.errors import ConfigError, InputError
from ssdevice.text import tokenizer_limits as limits
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tokenizer_limits import MAX_GROWTH, MAX_PIECE
from tests.runtime.scripted import make_tokenizer

CHAT = ChatFormat("{{ messages[0].content }}", {}, (0,))
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
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
    table = (
        (1 << 10).to_bytes(4, "little") + bytes(1 << 10) + b"".join(text + b"\0" for text in texts)
    )
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def with_marks(ids: list[int], times: int = 1) -> dict[str, Any]:
    """A post-processor that writes ``ids`` before a text."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    mark = {"SpecialToken": {"id": "m", "type_id": 0}}
    marks = {"m": {"id": "m", "ids": ids, "tokens": ["m"] * len(ids)}}
    single = [*[mark] * times, text]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text],
        "special_tokens": marks,
    }


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 4)},
        {
            "normalizer": normalizers.Sequence(
                [normalizers.Sequence([normalizers.Replace("ab", "b" * 9)] * 3)] * 2
            )
        },
        {"normalizer": normalizers.Replace(Regex("(?=a)"), "x" * MAX_GROWTH)},
        {"normalizer": normalizers.Replace("", "x" * MAX_GROWTH)},
        {"normalizer": normalizers.Prepend("x" * MAX_GROWTH)},
        {"normalizer": charsmap(b"x", b"y" * (MAX_GROWTH + 1))},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 11)},
        {"decoder": decoders.Sequence([decoders.BPEDecoder(suffix="")] * 11)},
        {"decoder": decoders.Replace("a", "a" * (MAX_GROWTH + 1))},
        {"post_processor": processors.TemplateProcessing(" ".join(["$A"] * (MAX_GROWTH + 1)))},
        {"post_processor": with_marks([0] * (MAX_GROWTH + 1))},
        {"post_processor": with_marks([0] * 33, 32)},
    ],
)
def test_what_could_fill_the_memory_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"tokenizer.json: its steps can make a text more than {MAX_GROWTH} times",
    ):
        opened(**parts)


@pytest.mark.parametrize(
    "parts",
    [
        {
            "normalizer": normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            ),
            "decoder": decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
        },
        {
            "normalizer": normalizers.Sequence(
                [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁")]
            )
        },
        {"normalizer": charsmap(b"y" * 36), "pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(), "decoder": decoders.ByteLevel()},
        {"normalizer": normalizers.BertNormalizer(), "decoder": decoders.WordPiece()},
        {"post_processor": with_marks([0])},
        {"model": models.Unigram([("a", -1.0), ("x" * MAX_PIECE, -2.0)], 0)},
    ],
)
def test_steps_of_models_are_taken(parts: dict[str, Any]) -> None:
    assert opened(**parts).encode("abc")


def table(size: int, held: int) -> dict[str, str]:
    """A table of characters that says it has ``size`` bytes and has ``held``."""
    content = size.to_bytes(4, "little") + bytes(held)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize(
    "damaged",
    [
        table((1 << 32) - 4, 64),
        table(1 << 10, (1 << 10) - 4),
        table((1 << 10) - 1, 1 << 10),
        {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [table(1 << 31, 64)]}],
        },
        *(
            table(0, 0) | {"precompiled_charsmap": text}
            for text in ("", "AAA=", "AAAA", "AAAAAA", "?", [0], None)
        ),
    ],
)
def test_a_table_that_is_not_as_large_as_it_says_is_refused(damaged: dict[str, Any]) -> None:
    """The library would allocate twice what it says, up to 8.6 GB, before it looks."""
    with pytest.raises(ConfigError, match=r"^tokenizer\.json: 'precompiled_charsmap' is damaged$"):
        opened(normalizer=damaged)


@pytest.mark.parametrize(
    "escaped",
    [r"precompiled\u005fcharsmap", r"\u0070recompiled_charsmap", r"precompiled_charsma\u0070"],
)
def test_a_table_is_found_under_an_escaped_name(escaped: str) -> None:
    document = json.loads(make_tokenizer().tokenizer_json) | {"normalizer": table(1 << 31, 64)}
    content = json.dumps(document).replace("precompiled_charsmap", escaped)
    with pytest.raises(ConfigError, match="'precompiled_charsmap' is damaged"):
        ChatTokenizer.from_bytes(content.encode(), CHAT)


@pytest.mark.parametrize(
    "model",
    [
        {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["x" * (MAX_PIECE + 1), -2.0]]},
        {"vocab": [["é" * (MAX_PIECE // 2 + 1), -1.0]]},
        {"vocab": [["a", -1.0]] * 101},
    ],
)
def test_pieces_for_which_the_library_would_take_gigabytes_are_refused(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PIECES", 100)
    with pytest.raises(
        ConfigError, match=rf"more than {MAX_PIECE} bytes in one piece of its vocabulary, or"
    ):
        opened(model=model)


def test_a_file_of_any_size_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: \d+ bytes, at most 100 are allowed"):
        opened()


def test_ids_of_which_no_list_can_be_written_are_refused_where_it_is() -> None:
    """A list of all ids up to 2³⁰ took 69 s and 4 GB."""
    tokenizer = opened(
        model={"type": "WordLevel", "vocab": {"a": 0, "b": 1 << 30}, "unk_token": "a"}
    )
    assert tokenizer.encode("b") == [1 << 30]
    with pytest.raises(
        ConfigError, match="a token with id 1073741824, at most 16777215 is allowed"
    ):
        _ = tokenizer.tokenizer_json


@pytest.mark.parametrize(
    "parts",
    [
        {"model": BPE | {"continuing_subword_prefix": "###"}},
        {"model": BPE | {"vocab": {"a": 0}}},
        {"decoder": {"type": "Strip", "content": "a", "start": -1, "stop": 0}},
    ],
)
def test_what_the_library_cannot_read_is_one_error(parts: dict[str, Any]) -> None:
    """It panics at some of these, which is no Exception of Python."""
    with pytest.raises(
        ConfigError,
        match=r"^tokenizer\.json: not a tokenizer this version of tokenizers can read: ",
    ):
        opened(**parts)


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
