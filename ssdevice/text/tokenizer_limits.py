"""A tokenizer is a program, too, and comes with a bundle: how much longer it can make a text, and its failures."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

from tokenizers import Tokenizer

from ssdevice.errors import ConfigError, InputError, first_line

MAX_GROWTH = 1024
"""Those of models make a text 1 to about 100 times longer at most, by their tables of Unicode characters."""


def check_growth(tokenizer: Tokenizer, where: str) -> None:
    """Raise ConfigError if a text can become too long: ten steps that each write ten letters for one fill a memory."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor, tokenizer.decoder)
    found = prod(_growth(json.loads(part.__getstate__())) for part in parts if part is not None)
    if found > MAX_GROWTH:
        raise ConfigError(f"{where}: its steps can make a text more than {MAX_GROWTH} times longer")


def _growth(step: dict[str, Any]) -> int:
    """A bound for one step, by its JSON in ``tokenizer.json``."""
    kind = step["type"]
    if kind == "Sequence":
        return prod(map(_growth, chain.from_iterable(value for value in step.values() if isinstance(value, list))))
    if kind == "Replace" and step["pattern"].get("String"):
        return max(1, -(-len(step["content"]) // len(step["pattern"]["String"])))
    if kind in ("Replace", "Prepend"):  # between any two characters
        return 1 + len(step["content" if kind == "Replace" else "prepend"])
    if kind == "Precompiled":  # the size of a trie, the trie, texts that end with a zero
        table = base64.b64decode(step["precompiled_charsmap"])
        return max(map(len, [b" ", *table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")]))
    if kind == "TemplateProcessing":
        return max(1, sum("Sequence" in piece for piece in step["single"]))
    return 2 if kind == "ByteLevel" or "" in step.values() else 1  # what is empty is found between any two characters


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """In this context the library's errors are InputErrors, also its panics, which are no Exceptions."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"the tokenizer cannot {what}: {first_line(error)}") from error
