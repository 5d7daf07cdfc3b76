"""Lark grammars before they are compiled: their JSON schemas, and how deep their names go."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ssdevice.errors import InputError
from ssdevice.runtime.sampling.schemas import (
    MAX_LEVELS,
    SMALL_CHARACTERS,
    SMALL_LEVELS,
    Schema,
    height,
)
from ssdevice.strict_json import STRINGS_AND_BRACKETS, parse

MAX_DEPTH = 100
"""Levels of a JSON schema as it is written; llguidance's own limit is a little higher."""
_WORDS = re.compile(
    r"""
    (?P<space>[ \t\r]+ | (?:\#|//)[^\n]*)
    | (?P<line>\n)
    | (?P<text>"(?:\\.|[^"\\\n])*"i?)
    | (?P<expression>/(?:\\.|[^/\\])+/[imslux]*)
    | (?P<json>%(?:json|llguidance|regex)\b)
    | (?P<token><[^<>\s]+>)
    | (?P<name>[!?_]*[A-Za-z][_A-Za-z0-9\-]*)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_SCALAR = re.compile(r"\s*[^\s\"\[\]{}]+")
_SMALL_KINDS = frozenset(("text", "token", "name", "schema"))
_SMALL_SIGNS = frozenset(":|()")


@dataclass(frozen=True)
class _Word:
    """``kind``: a group of _WORDS, or ``schema``; ``first``: whether its line begins with it."""

    kind: str
    text: str
    first: bool = False
    schema: Schema | None = None


@dataclass(frozen=True)
class Lark:
    """A grammar's text."""

    source: str

    def written(self) -> str:
        """The grammar for llguidance, with schemas as they are meant, see ``Schema.written``.

        Raises InputError for what llguidance would take in another way, or not survive.
        """
        levels, _ = self._heights
        if levels > MAX_LEVELS:
            raise InputError(
                f"the Lark grammar is {levels} levels deep through its names, at most {MAX_LEVELS}"
            )
        for word in self._words:
            if word.schema is not None:
                word.schema.check_counts()
        return "".join(
            word.text if word.schema is None else word.schema.written() for word in self._words
        )

    @cached_property
    def small(self) -> bool:
        """Whether it has only rules of texts, special tokens and small schemas: see
        ``Schema.small``.
        """
        if len(self.source) > SMALL_CHARACTERS:
            return False
        levels, recursive = self._heights
        return levels <= SMALL_LEVELS and not recursive and all(map(_is_small, self._words))

    @cached_property
    def _words(self) -> list[_Word]:
        words: list[_Word] = []
        at = 0
        first = True
        while at < len(self.source):
            found = _WORDS.match(self.source, at)
            assert found is not None and found.lastgroup is not None
            words.append(_Word(found.lastgroup, found[0], first))
            at = found.end()
            if found.lastgroup == "json":
                end = _end_of_value(self.source, at)
                if found[0] == "%json":
                    words.append(_schema_word(self.source[at:end]))
                else:
                    words.append(_Word("other", self.source[at:end]))
                at = end
            if found.lastgroup != "space":
                first = found.lastgroup == "line"
        return words

    @cached_property
    def _heights(self) -> tuple[int, bool]:
        """How many rules and terminals are within one another, and whether one is within itself."""
        words = [word for word in self._words if word.kind not in ("space", "line")]
        graph: dict[str, list[str]] = {"": []}
        inside = ""
        level = 0
        for word, after in zip(words, [*words[1:], _Word("other", "")], strict=True):
            if word.text in "([{":
                level += 1
            elif word.text in ")]}":
                level -= 1
            if word.kind != "name":
                continue
            name = word.text.lstrip("!?")
            if word.first and level == 0 and after.text in (":", ".", "[", "{"):
                inside = name
                graph.setdefault(inside, [])
                graph[""].append(inside)
            else:
                graph[inside].append(name)
        return height(graph, "")


def _end_of_value(source: str, at: int) -> int:
    """Where the JSON value ends that begins at ``at``, perhaps after white space."""
    scalar = _SCALAR.match(source, at)
    if scalar is not None:
        return scalar.end()
    level = 0
    for found in STRINGS_AND_BRACKETS.finditer(source, at):
        level += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if level <= 0:
            return found.end()
    return len(source)


def _schema_word(text: str) -> _Word:
    what = "Lark grammar's JSON schema"
    value: Any = parse(text, f"the {what}", InputError, MAX_DEPTH)
    if not isinstance(value, dict):
        return _Word("other", text)
    return _Word("schema", text, schema=Schema(value, what, spacing={}))


def _is_small(word: _Word) -> bool:
    if word.schema is not None:
        return word.schema.small
    if word.kind == "name":
        return word.text[0].islower()  # a terminal is an expression
    if word.kind == "other":
        return word.text in _SMALL_SIGNS
    return word.kind in _SMALL_KINDS or word.kind in ("space", "line") or word.text == "%json"
