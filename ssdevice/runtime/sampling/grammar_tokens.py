"""llguidance's view of a tokenizer, in which text of added tokens is written as these tokens.

llguidance itself takes every added token for one that is no text. Where a grammar's text contains
such a token, its mask allows the token only, and its parser then refuses it.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ssdevice.errors import InputError, first_line, needs_extra
from ssdevice.text.tokenizer import ChatTokenizer

EXTRA = "structure"
_PART = re.compile(
    r"""(?P<json>%json\s*(?=\{))
    | (?P<text>"(?:\\.|[^"\\])*")
    | (?P<comment>(?://|\#)[^\n]*)
    | (?P<regex>/(?:\\.|[^/\\])+/)
    | <(?P<name>[^<>\s"]+)>""",
    re.VERBOSE | re.DOTALL,
)
"""The parts of a Lark grammar in which a token may be named."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def text_tokens(tokenizer: ChatTokenizer) -> frozenset[int]:
    """The added tokens that are text wherever they are: the ones that are not special."""
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    stops = tokenizer.stop_ids
    return frozenset(i for i, token in added.items() if not token.special and i not in stops)


def text_tokens_of_regex(tokenizer: ChatTokenizer, source: str) -> frozenset[int]:
    """The added tokens that are text in a regular expression: special ones if it spells them."""
    return text_tokens(tokenizer) | _spelled(tokenizer, _without_escapes(source))


def text_tokens_of_lark(tokenizer: ChatTokenizer, source: str) -> frozenset[int]:
    """The added tokens that are text in a Lark grammar.

    Special ones are text if a string or regular expression spells them. A token that a rule names
    without quotes (``<think>``, ``<[151667]>``) is none: what is before it ends there.
    """
    found = set(text_tokens(tokenizer))
    named = set[int]()
    for kind, part in _parts(source):
        if kind == "name":
            named |= _named(tokenizer, part)
        else:
            found |= _spelled(tokenizer, part)
    return frozenset(found - named)


def _parts(source: str) -> Iterator[tuple[str, str]]:
    """``(kind, text)`` of the strings, regular expressions and names of tokens in a Lark grammar.

    JSON schemas are left out: what is in them is the text of a JSON string.
    """
    at = 0
    while found := _PART.search(source, at):
        at = found.end()
        kind = str(found.lastgroup)
        part = str(found[kind])
        if kind == "json":
            at = _end_of_json(source, at)
        elif kind == "text":
            yield kind, _of_string(part)
        elif kind == "regex":
            yield kind, _without_escapes(part[1:-1])
        elif kind == "name":
            yield kind, part


def _end_of_json(source: str, at: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(source, at)[1]
    except (ValueError, RecursionError):  # llguidance says what is wrong with it
        return at


def _of_string(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return literal[1:-1]


def _without_escapes(pattern: str) -> str:
    return re.sub(r"\\(\W)", r"\1", pattern)


def _spelled(tokenizer: ChatTokenizer, text: str) -> set[int]:
    """The special tokens whose text is in ``text``, without those that end an answer."""
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    stops = tokenizer.stop_ids
    return {
        i
        for i, token in added.items()
        if token.special and token.content in text and i not in stops
    }


def _named(tokenizer: ChatTokenizer, name: str) -> set[int]:
    """The added tokens that ``<name>`` stands for: one of that text, or ``[5-7,9]``."""
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    if not name.startswith("["):
        return {i for i, token in added.items() if token.content == f"<{name}>"}
    found = set[int]()
    for first, last in _RANGE.findall(name):
        found |= {i for i in added if int(first) <= i <= int(last or first)}
    return found


@lru_cache(maxsize=4)
def grammar_tokens(tokenizer: ChatTokenizer, vocab: int, text: frozenset[int]) -> Any:
    """The ``LLTokenizer`` of a model with ``vocab`` tokens, in which the added tokens ``text`` are
    text.

    Raises InputError for a tokenizer that llguidance cannot read, MissingExtraError without
    llguidance.
    """
    with needs_extra(EXTRA):
        from llguidance import LLTokenizer
    base = _base(tokenizer, vocab)
    if not tokenizer.tokenizer.get_added_tokens_decoder():
        return base
    spelling: Any = _Spelling(tokenizer, base, text)
    return LLTokenizer(spelling, n_vocab=vocab, eos_token=list(tokenizer.stop_ids))


@lru_cache(maxsize=4)
def _base(tokenizer: ChatTokenizer, vocab: int) -> Any:
    """The ``LLTokenizer`` in which no added token is text."""
    from llguidance import LLTokenizer

    source = tokenizer.tokenizer_json.decode("utf-8")
    stops = list(tokenizer.stop_ids)
    try:
        # From the JSON itself: llguidance's module for transformers would import them.
        return LLTokenizer(source, n_vocab=vocab, eos_token=stops)
    except ValueError as error:
        raise InputError(f"no structures with this tokenizer: {first_line(error)}") from error


class _Spelling:
    """What ``LLTokenizer`` asks of a tokenizer: the bytes of all tokens, and the tokens of a text.

    ``text``: the added tokens that are text; the others are written in pieces.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: ChatTokenizer, base: Any, text: frozenset[int]) -> None:
        self.eos_token_id = tokenizer.stop_ids[0]
        self.tokens = [base.decode_bytes([i]) for i in range(base.vocab_size)]
        self._base = base
        self._special = frozenset(filter(base.is_special_token, range(base.vocab_size)))
        self.special_token_ids = sorted(self._special - text)
        self._written = {}
        for i in sorted(text, reverse=True):  # of two with one text, the lower id
            said, self.tokens[i] = tokenizer.texts.said(i, first=False)
            self._written[said] = i
        longest_first = sorted(self._written, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def __call__(self, text: str) -> list[int]:
        if not self._written:
            return self._pieces(text)
        ids = list[int]()
        for part in self._marks.split(text):
            if part in self._written:
                ids.append(self._written[part])
            elif part:
                ids += self._pieces(part)
        return ids

    def _pieces(self, text: str) -> list[int]:
        """The tokens of a text in which no added token is text."""
        ids: list[int] = self._base.tokenize_str(text)
        # The tokenizer may read a special token there, or normalize.
        if self._special.isdisjoint(ids) and self._base.decode_bytes(ids) == text.encode():
            return ids
        found: list[int] = self._base.greedy_tokenize(text)
        return found
