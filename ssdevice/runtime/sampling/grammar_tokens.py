"""Which added tokens are text in a grammar.

llguidance itself takes every added token for one that is no text. Where a grammar's text contains
such a token, its mask allows the token only, and its parser then refuses it. So it is told of them,
see ``matching.tokens_of``.
"""

import json
import re
from collections.abc import Iterator, Set

from ssdevice.text.tokenizer import ChatTokenizer

Spelled = tuple[tuple[int, str], ...] | None
"""The added tokens that are text, by id, and what they say; None for a tokenizer without any added
token.
"""
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


def spelled_anywhere(tokenizer: ChatTokenizer) -> Spelled:
    """The added tokens that are text wherever they are."""
    return _spelled_of(tokenizer, _text_tokens(tokenizer))


def _text_tokens(tokenizer: ChatTokenizer) -> frozenset[int]:
    """The added tokens that are text wherever they are: the ones that are not special."""
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    stops = tokenizer.stop_ids
    return frozenset(i for i, token in added.items() if not token.special and i not in stops)


def spelled_in_regex(tokenizer: ChatTokenizer, source: str) -> Spelled:
    """The added tokens that are text in a regular expression: special ones if it spells them."""
    named = _named_by(tokenizer, _without_escapes(source))
    return _spelled_of(tokenizer, _text_tokens(tokenizer) | named)


def spelled_in_lark(tokenizer: ChatTokenizer, source: str) -> Spelled:
    """The added tokens that are text in a Lark grammar.

    Special ones are text if a string or regular expression spells them. A token that a rule names
    without quotes (``<think>``, ``<[151667]>``) is none: what is before it ends there.
    """
    found = set(_text_tokens(tokenizer))
    named = set[int]()
    for kind, part in _parts(source):
        if kind == "name":
            named |= _named(tokenizer, part)
        else:
            found |= _named_by(tokenizer, part)
    return _spelled_of(tokenizer, found - named)


def _spelled_of(tokenizer: ChatTokenizer, tokens: Set[int]) -> Spelled:
    if not tokenizer.tokenizer.get_added_tokens_decoder():
        return None
    return tuple((token, tokenizer.texts.said(token, first=False)[0]) for token in sorted(tokens))


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


def _named_by(tokenizer: ChatTokenizer, text: str) -> set[int]:
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
