"""Keys of the JSON objects in an answer: none may come twice in one, which no grammar says."""

import json
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ssdevice.runtime.sampling.matching import Following, GrammarError
from ssdevice.text.tokenizer import ChatTokenizer

QUOTE = ord('"')
BACKSLASH = ord("\\")
MOST_QUOTES = 3
"""Of those that a token must have to end a key: its value's string, and both of the key."""


class TokenBytes:
    """What the tokens of a tokenizer say after others, as bytes."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._said: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        said = self._said.get(token)
        if said is None:
            said = self._tokenizer.texts.said(token, False)[1]
            self._said[token] = said
        return said

    @cached_property
    def quotes(self) -> list[list[int]]:
        """The tokens that have at least 0, 1, .. MOST_QUOTES quotation marks."""
        found: list[list[int]] = [[] for _ in range(MOST_QUOTES + 1)]
        for text, token in self._tokenizer.tokenizer.get_vocab().items():
            count = 1 if text == "<0x22>" else text.count('"')
            for least in range(1, min(count, MOST_QUOTES) + 1):
                found[least].append(token)
        return found


class Place(NamedTuple):
    """Where a JSON text ends so far.

    ``within``: of each list and object around it the keys so far, None for a list. ``string``: what
    the key says that is not closed yet, empty in another string, None outside of strings.
    ``escaped``: whether a backslash came last. ``key``: whether the string is a key, or the next
    one will be.
    """

    within: tuple[frozenset[str] | None, ...] = ()
    string: bytes | None = None
    escaped: bool = False
    key: bool = False

    def after(self, text: bytes) -> "Place | None":
        """The place after more text; None if that repeats a key."""
        within, string, escaped, key = self
        for byte in text:
            if string is None:
                if byte == QUOTE:
                    string = b""
                else:
                    within, key = _outside(within, key, byte)
            elif byte == QUOTE and not escaped:
                if key:
                    keys = _with_key(within[-1], string)
                    if keys is None:
                        return None
                    within = (*within[:-1], keys)
                string = None
                key = False
            else:
                escaped = byte == BACKSLASH and not escaped
                if key:
                    string += bytes((byte,))
        return Place(within, string, escaped, key)

    @property
    def quotes(self) -> int:
        """How many quotation marks are between here and the end of a key, at least."""
        if self.string is None:
            return 2
        return 1 if self.key else 3


class UniqueKeys:
    """``Following`` a grammar of JSON, without the tokens that would repeat a key."""

    def __init__(self, inner: Following, tokens: TokenBytes) -> None:
        self._inner = inner
        self._tokens = tokens
        self._place = Place()

    def mask(self) -> bytes:
        bits = self._inner.mask()
        if not any(self._place.within):
            return bits
        changed = np.frombuffer(bits, np.uint8).copy()
        for token in self._tokens.quotes[self._place.quotes]:
            at, bit = divmod(token, 8)
            if at < len(changed) and changed[at] >> bit & 1 and self._repeats(token):
                changed[at] &= ~np.uint8(1 << bit)
        if not changed.any():
            raise GrammarError("only keys that its object has already could come next")
        return changed.tobytes()

    def accept(self, token: int) -> None:
        self._inner.accept(token)
        self._place = self._place.after(self._tokens.of(token)) or self._place

    def allows(self, token: int) -> bool:
        return self._inner.allows(token) and not self._repeats(token)

    def forced(self) -> list[int]:
        tokens = self._inner.forced()
        place = self._place
        for count, token in enumerate(tokens):
            after = place.after(self._tokens.of(token))
            if after is None:
                return tokens[:count]
            place = after
        return tokens

    def close(self) -> None:
        self._inner.close()

    def _repeats(self, token: int) -> bool:
        return self._place.after(self._tokens.of(token)) is None


def _outside(
    within: tuple[frozenset[str] | None, ...], key: bool, byte: int
) -> tuple[tuple[frozenset[str] | None, ...], bool]:
    """``within`` and ``key`` of a place after a byte that is in no string."""
    if byte == ord("{"):
        return (*within, frozenset()), True
    if byte == ord("["):
        return (*within, None), False
    if byte in b"}]":
        return within[:-1], False
    if byte == ord(","):
        return within, bool(within) and within[-1] is not None
    return within, key


def _with_key(keys: frozenset[str] | None, written: bytes) -> frozenset[str] | None:
    """An object's keys with another; None if it has that already."""
    key = json.loads(b'"' + written + b'"', strict=False)
    if keys is None or key in keys:
        return None
    return keys | {key}
