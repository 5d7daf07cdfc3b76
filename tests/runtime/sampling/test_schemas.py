"""What JSON schemas allow, beside jsonschema: texts that end fit, and each key comes once."""

from __future__ import annotations

import datetime
import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from ssdevice.errors import InputError
from ssdevice.runtime.sampling.keys import TokenBytes
from ssdevice.runtime.sampling.structure import Grammar, Structure, open_grammar
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.sampling.letters import letters

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
INTEGER = {"type": "integer"}
TEXT = {"type": "string"}


def follow(grammar: Grammar, tokens: list[int]) -> bool:
    """Whether a grammar allows tokens one after another."""
    for token in tokens:
        if not grammar.allows(token):
            return False
        grammar.accept(token)
    return True


def ends(schema: dict[str, Any], text: str, tokenizer: ChatTokenizer) -> bool:
    """Whether the text can be a whole answer."""
    vocab = tokenizer.tokenizer.get_vocab_size()
    grammar = open_grammar(Structure.json_schema(schema), tokenizer, vocab)
    try:
        if not follow(grammar, tokenizer.encode(text)):
            return False
        scores = grammar.masked(np.zeros(vocab, np.float32))
        return bool(np.isfinite(scores[tokenizer.stop_ids[0]]))
    finally:
        grammar.close()


def fits(schema: dict[str, Any], text: str) -> bool:
    """Whether jsonschema takes the text, and no key comes twice in it."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise jsonschema.ValidationError("a key comes twice")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=once)
        jsonschema.validate(value, schema, format_checker=CHECKER)
    except jsonschema.ValidationError:
        return False
    return True


OPEN: dict[str, dict[str, Any]] = {
    "any keys": {"type": "object"},
    "counted keys": {"type": "object", "minProperties": 2, "additionalProperties": INTEGER},
    "keys by pattern": {
        "type": "object",
        "patternProperties": {"^a": INTEGER},
        "minProperties": 2,
        "additionalProperties": False,
    },
    "named and other keys": {
        "type": "object",
        "properties": {"a": INTEGER, "\t": INTEGER, 'q"': INTEGER, "é": INTEGER},
        "additionalProperties": TEXT,
    },
    "patterns and other keys": {
        "type": "object",
        "patternProperties": {"^a": INTEGER},
        "additionalProperties": TEXT,
    },
    "objects within": {"type": "array", "items": {"additionalProperties": {"type": "object"}}},
    "in any value": {"type": "object", "properties": {"a": True}, "additionalProperties": False},
    "in any list": {"type": "array"},
    "referred to": {"$ref": "#/$defs/o", "$defs": {"o": {"type": "object"}}},
}
OBJECTS = [
    '{"a": 1, "a": 2}',
    '{"a": 1, "\\u0061": 2}',
    '{"\\u0061": "x"}',
    '{"\\t": "x"}',
    '{"\\u0009": "x"}',
    '{"q\\"": "x"}',
    '{"q\\u0022": "x"}',
    '{"\\u00e9": "x"}',
    '{"\\u00E9": "x"}',
    '{"a": 1, "ab": 2}',
    '{"ab": 1, "a": 2, "ab": 3}',
    '{"b": "a", "a": 1}',
    '{"b": "x", "b": "y"}',
    '{"b": "\\"b", "c": "b"}',
    '{"\\\\": "x", "\\\\": "y"}',
    '{"": "x", "": "y"}',
    '{"x": 1}',
    '{"x": 1, "y": 2}',
    '[{"a": {}, "b": {}}, {"a": {}}]',
    '[{"a": {}, "a": {}}]',
    '[{"a": {"a": {"a": {}}}}]',
    '{"a": {"x": [1, {"x": 1, "y": 2}], "y": {"x": 1}}}',
    '{"a": {"x": [1, {"x": 1, "x": 2}], "y": {"x": 1}}}',
    '{"a": {"x": [1, ["a", "a", "a"]], "x": "x"}}',
]


@pytest.mark.parametrize("name", OPEN)
def test_keys_come_once_and_are_what_they_say(name: str) -> None:
    allowed = 0
    for text in OBJECTS:
        if ends(OPEN[name], text, letters()):
            assert fits(OPEN[name], text), text
            allowed += 1
    assert allowed


def test_no_way_to_write_a_key_repeats_it() -> None:
    """Whatever tokens it is of: random walks, of which the shortest keys come often."""
    tokenizer = letters()
    vocab = tokenizer.tokenizer.get_vocab_size()
    schema = {"type": "object", "minProperties": 3, "additionalProperties": {"enum": [1, "n"]}}
    structure = Structure.json_schema(schema)
    wanted = sorted(set(tokenizer.encode('na":{}, 1')) | set(TokenBytes(tokenizer).quotes[1]))
    draw = np.random.default_rng(0)
    for _ in range(8):
        grammar = open_grammar(structure, tokenizer, vocab)
        tokens: list[int] = []
        while not tokens or tokens[-1] not in tokenizer.stop_ids:
            scores = draw.normal(size=vocab).astype(np.float32)
            scores[wanted] += 4
            scores[list(tokenizer.stop_ids)] += 4
            forced = list(grammar.forced)
            masked = grammar.masked(scores)
            for token in set(draw.integers(vocab, size=20).tolist()) - set(tokenizer.stop_ids):
                allowed = bool(np.isfinite(masked[token]))
                # Of several ways to write what is certain, the mask has the tokenizer's own.
                assert allowed == grammar.allows(token) or (forced and not allowed)
            token = int(np.argmax(masked))
            stopping = token in tokenizer.stop_ids
            assert not forced or forced[0] == token or stopping
            tokens.append(token)
            grammar.accept(token)
        grammar.close()
        text = tokenizer.decode(tokens[:-1])
        assert fits(schema, text), text


def test_where_only_a_repeated_key_could_come_the_answer_ends() -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^a$": INTEGER},
        "additionalProperties": False,
        "minProperties": 2,
    }
    tokenizer = letters()
    vocab = tokenizer.tokenizer.get_vocab_size()
    grammar = open_grammar(Structure.json_schema(schema), tokenizer, vocab)
    assert follow(grammar, tokenizer.encode('{"a": 1, "a'))
    assert not grammar.forced
    with pytest.raises(InputError, match="allows no answer: only keys that its object has already"):
        grammar.masked(np.zeros(vocab, np.float32))
    grammar.close()


def test_a_count_of_keys_is_refused_within_lark_where_keys_are_not_followed() -> None:
    tokenizer = letters()
    vocab = tokenizer.tokenizer.get_vocab_size()

    def within(schema: dict[str, Any]) -> Structure:
        return Structure.lark(f'start: "n" %json {json.dumps(schema)}')

    with pytest.raises(InputError, match="minProperties 2 counts keys of any name"):
        open_grammar(within(OPEN["counted keys"]), tokenizer, vocab)
    with pytest.raises(InputError, match="minProperties 2 counts keys of any name"):
        open_grammar(within(OPEN["keys by pattern"]), tokenizer, vocab)
    listed = {"required": ["a"], "properties": {"a": INTEGER}, "type": "object"}
    open_grammar(within({**listed, "minProperties": 2}), tokenizer, vocab).close()


@pytest.mark.parametrize("key", ["json_allowed_escapes", "json_allow_general_unicode_escapes"])
def test_options_that_let_a_key_be_written_in_two_ways_are_refused(key: str) -> None:
    options = {key: "u" if key == "json_allowed_escapes" else True}
    structure = Structure.json_schema({"type": "object", "x-guidance": options})
    with pytest.raises(InputError, match="a key could be written in two ways"):
        open_grammar(structure, letters(), letters().tokenizer.get_vocab_size())


def days() -> Iterator[str]:
    """Days around the ends of months, in years that leap and in others, and what is no day."""
    years = ["0000", "0001", "0004", "0100", "0400", "1900", "1999", "2000", "2023", "2024", "9999"]
    months = [f"{month:02}" for month in range(14)]
    for parts in itertools.product(years, months, ["00", "01", "28", "29", "30", "31", "32"]):
        yield "-".join(parts)


@cache
def is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


TIMES = {
    "00:00:00Z": True,
    "23:59:59.25+23:59": True,
    "12:30:00-00:00": True,
    "12:30:60Z": False,
    "24:00:00Z": False,
    "12:60:00Z": False,
    "12:30:00": False,
    "12:30:00+24:00": False,
    "1:30:00Z": False,
}


def matches(schema: dict[str, Any], texts: Iterator[str]) -> set[str]:
    """The texts that a schema of strings allows, in one grammar of their tokens."""
    return {text for text in texts if ends(schema, json.dumps(text), letters())}


def test_dates_are_days() -> None:
    texts = list(days())
    assert matches({"type": "string", "format": "date"}, iter(texts)) == set(filter(is_day, texts))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date", "pattern": "^2024"},
        {"type": "string", "format": "date", "allOf": [{"pattern": "^2024"}]},
        {"allOf": [{"format": "date", "type": "string"}, {"pattern": "^2024"}]},
        {"$ref": "#/d", "d": {"format": "date", "type": "string", "pattern": "^2024"}},
        {"anyOf": [{"type": "string", "format": "date", "pattern": "^2024"}, INTEGER]},
    ],
    ids=range(5),
)
def test_dates_have_their_other_constraints(schema: dict[str, Any]) -> None:
    texts = [text for text in days() if text[:4] in ("2023", "2024") and text[5:7] in ("02", "04")]
    expected = {text for text in texts if is_day(text) and text.startswith("2024")}
    assert matches(schema, iter(texts)) == expected


def test_times_have_sixty_seconds() -> None:
    found = matches({"type": "string", "format": "time"}, iter(TIMES))
    assert found == {text for text, right in TIMES.items() if right}
    moments = [f"{day}T{time}" for day in ("2024-02-29", "2023-02-29") for time in TIMES]
    assert matches({"type": "string", "format": "date-time"}, iter(moments)) == {
        f"2024-02-29T{text}" for text, right in TIMES.items() if right
    }


class Drawn:
    """Random schemas and answers."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def schema(self, depth: int) -> Any:
        leaves: list[Any] = [
            True,
            {},
            {"type": "integer", "minimum": 0, "maximum": 99},
            {"type": "string", "maxLength": 3},
            {"type": "string", "format": self.draw.choice(["date", "time", "uuid"])},
            {"enum": ["a", 1, None, {"a": 1}]},
            {"$ref": "#/$defs/a"},
        ]
        kind = self.draw.choice(["leaf", "object", "object", "array", "anyOf", "allOf"])
        if depth == 0 or kind == "leaf":
            return self.draw.choice(leaves)
        if kind == "object":
            return self.objects(depth)
        if kind == "array":
            return {
                "type": "array",
                "items": self.schema(depth - 1),
                "maxItems": self.draw.randrange(4),
            }
        return {kind: [self.schema(depth - 1) for _ in range(2)]}

    def objects(self, depth: int) -> dict[str, Any]:
        names = self.draw.sample("abcn", self.draw.randrange(4))
        schema: dict[str, Any] = {"type": "object"}
        schema["properties"] = {name: self.schema(depth - 1) for name in names}
        schema["required"] = [name for name in names if self.draw.random() < 0.5]
        if self.draw.random() < 0.5:
            schema["additionalProperties"] = self.draw.choice([False, True, INTEGER])
        if self.draw.random() < 0.2:
            schema["patternProperties"] = {"^a": self.schema(depth - 1)}
        if self.draw.random() < 0.3:
            schema["minProperties"] = self.draw.randrange(4)
        return schema

    def damaged(self, schema: Any) -> Any:
        """The schema with other values where they do not belong."""
        if isinstance(schema, list):
            return [self.damaged(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        changed = {key: self.damaged(each) for key, each in schema.items()}
        if self.draw.random() < 0.1:
            changed[self.draw.choice(KEYWORDS)] = self.draw.choice(JUNK)
        return changed

    def answer(self, grammar: Grammar, tokenizer: ChatTokenizer) -> str | None:
        """A text that the grammar allows, mostly a short one; None if it does not end soon."""
        likely = tokenizer.encode('}]"a:,1')
        stops = list(tokenizer.stop_ids)
        tokens: list[int] = []
        while len(tokens) < 120:
            scores = np.array([self.draw.random() for _ in range(VOCAB)], np.float32)
            scores[likely] += 0.7
            scores[stops] += 2
            token = int(np.argmax(grammar.masked(scores)))
            if token in stops:
                return tokenizer.decode(tokens)
            tokens.append(token)
            grammar.accept(token)
        return None


VOCAB = letters().tokenizer.get_vocab_size()
LISTS = {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2}
KEYWORDS = [
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
    *("anyOf", "allOf", "$ref", "maxItems", "minLength", "maximum", "pattern", "format"),
    *("patternProperties", "minProperties", "prefixItems", "$defs", "multipleOf", "x-guidance"),
]
JUNK: list[Any] = [5, "x", None, True, [], {}, [5], ["a"], {"a": 5}, -1, 1.5, "#/a", "#/$defs/a/b"]


@pytest.mark.parametrize("damaged", [False, True])
def test_answers_that_end_fit_random_schemas(damaged: bool) -> None:
    """Whatever is wrong with one is said in a line."""
    drawn = Drawn(5)
    ended = 0
    for _ in range(80):
        schema = {**drawn.objects(3), "$defs": {"a": LISTS}}
        if damaged:
            schema = drawn.damaged(schema)
        try:
            grammar = open_grammar(Structure.json_schema(schema), letters(), VOCAB)
        except InputError as error:
            assert "\n" not in str(error)
            continue
        try:
            text = drawn.answer(grammar, letters())
        except InputError as error:
            assert "only keys that its object has already" in str(error)
            continue
        finally:
            grammar.close()
        if text is not None:
            assert damaged or fits(schema, text), (schema, text)
            ended += 1
    assert ended > 10
