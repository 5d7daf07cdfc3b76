"""A tokenizer is a program, too, and comes with a bundle: what it may take and write, and its
library's failures.
"""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

from tokenizers import Tokenizer

from ssdevice import strict_json
from ssdevice.errors import ConfigError, InputError, first_line

MAX_BYTES = 1 << 27
"""Of a ``tokenizer.json``; those of models with 262,144 tokens have 33 MB."""
MAX_PIECE = 1 << 10
MAX_PIECES = 1 << 23
"""Bytes of one piece of a Unigram model and of all: the library takes some 300 for each, and
recurses along a piece.
"""
MAX_IDS = 1 << 24
"""As in a manifest."""
MAX_GROWTH = 1024
"""Those of models make a text 1 to about 100 times longer at most, by their tables of Unicode
characters.
"""


_TABLE = "precompiled_charsmap"
_SIZED = re.compile(rf'{_TABLE}|"vocab"\s*:\s*\[|\\u00[4-7]'.encode())
"""What makes check_sizes read a file: names of what it checks, or an escaped letter that could be
in one of them.
"""


def check_sizes(content: bytes, where: str) -> None:
    """Raise ConfigError for a ``tokenizer.json`` that could fill a memory while the library reads
    it.
    """
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{where}: {len(content)} bytes, at most {MAX_BYTES} are allowed")
    if not _SIZED.search(content):
        return
    document = strict_json.parse(content, where)
    parts = [document.get("normalizer")] if isinstance(document, dict) else []
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if isinstance(part, dict) and _TABLE in part:
            _check_table(part[_TABLE], where)
    model = document.get("model") if isinstance(document, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    lists = (
        [entry for entry in vocab if entry and isinstance(entry, list)]
        if isinstance(vocab, list)
        else []
    )
    pieces = [len(str(entry[0]).encode(errors="replace")) for entry in lists]
    if max(pieces, default=0) > MAX_PIECE or sum(pieces) > MAX_PIECES:
        raise ConfigError(
            f"{where}: more than {MAX_PIECE} bytes in one piece of its vocabulary, "
            f"or {MAX_PIECES} in all"
        )


def _check_table(text: Any, where: str) -> None:
    """The library allocates as much for a table of characters as its first four bytes say."""
    try:
        table = base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        table = b""
    size = int.from_bytes(table[:4], "little")
    if len(table) < 4 or size % 4 or 4 + size > len(table):
        raise ConfigError(f"{where}: {_TABLE!r} is damaged")


def check_ids(tokenizer: Tokenizer) -> None:
    """Raise ConfigError for ids of tokens that are too large to write a list of all: the library
    would.
    """
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= MAX_IDS:
        raise ConfigError(
            f"the tokenizer has a token with id {largest}, at most {MAX_IDS - 1} is allowed"
        )


def check_growth(tokenizer: Tokenizer, where: str) -> None:
    """Raise ConfigError if a text can become too long: ten steps that each write ten letters for
    one fill a memory.
    """
    parts = (
        tokenizer.normalizer,
        tokenizer.pre_tokenizer,
        tokenizer.post_processor,
        tokenizer.decoder,
    )
    found = prod(_growth(json.loads(part.__getstate__())) for part in parts if part is not None)
    if found > MAX_GROWTH:
        raise ConfigError(f"{where}: its steps can make a text more than {MAX_GROWTH} times longer")


def _growth(step: dict[str, Any]) -> int:
    """A bound for one step, by its JSON in ``tokenizer.json``."""
    kind = step["type"]
    if kind == "Sequence":
        return prod(
            map(
                _growth,
                chain.from_iterable(value for value in step.values() if isinstance(value, list)),
            )
        )
    if kind == "Replace" and step["pattern"].get("String"):
        return max(1, -(-len(step["content"]) // len(step["pattern"]["String"])))
    if kind in ("Replace", "Prepend"):  # between any two characters
        return 1 + len(step["content" if kind == "Replace" else "prepend"])
    if kind == "Precompiled":  # the size of a trie, the trie, texts that end with a zero
        table = base64.b64decode(step[_TABLE])
        return max(map(len, [b" ", *table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")]))
    if kind == "TemplateProcessing":
        added = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        return max(
            1,
            sum(added.get(piece.get("SpecialToken", {}).get("id"), 1) for piece in step["single"]),
        )
    return (
        2 if kind == "ByteLevel" or "" in step.values() else 1
    )  # what is empty is found between any two characters


@contextmanager
def tokenizer_errors(what: str, kind: type[InputError] = InputError) -> Iterator[None]:
    """In this context the library's errors are of one ``kind``, also its panics, which are no
    Exceptions.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {first_line(error)}") from error
