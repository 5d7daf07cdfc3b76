"""The form an answer must have: a JSON schema, a regular expression or a Lark grammar, and its
state in an answer.

The state advances only by accepted tokens, so nothing has to be taken back where drafts are
rejected.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Self

import numpy as np

from ssdevice import arguments
from ssdevice.errors import InputError, first_line
from ssdevice.runtime.sampling.grammar_tokens import (
    grammar_tokens,
    text_tokens,
    text_tokens_of_lark,
    text_tokens_of_regex,
)
from ssdevice.runtime.sampling.noise import Scores
from ssdevice.strict_json import parse
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tools import ToolStyle, arguments_schema, functions_of

JSON_SCHEMA, REGEX, LARK = KINDS = ("json_schema", "regex", "lark")
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 100
"""Levels of a JSON schema; llguidance's own limit is a little higher."""
MAX_MULTIPLE = 100_000
"""Of the least common multiple of all ``multipleOf``: an automaton has that many states, and takes
0.5 s.
"""
EXACT = 1 << 53
"""llguidance reads numbers in float64 and makes 64-bit integers of whole ones.

Beyond this it would write others, and where only -2^63 is left, it recurses until the process dies.
"""
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python writes JSON.

A model that may write any white space can write nothing else for ever, and no text between two
values is certain.
"""
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 200_000, "verbose_errors": False}
"""Beside llguidance's own limits of size, of states, and of work for a token.

A grammar may take 0.5 s, not 4.
"""
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
OF_BYTES = np.where(_BITS, 0, -np.inf).astype(np.float32)
"""``[256, 8]``: what a byte of a mask adds to the scores of its eight tokens."""


@dataclass(frozen=True)
class Structure:
    """The form of an answer, for ``Sampling.structure``: ``kind`` is one of KINDS, ``source`` its
    text.

    Raises InputError for a source that is empty, too long or not Unicode. Other mistakes show when
    an answer begins.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"structure kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if not arguments.text(self.kind, self.source).strip():
            raise InputError(f"the {self.name} is empty")
        if len(self.source) > MAX_CHARACTERS:
            raise InputError(
                f"the {self.name} has {len(self.source)} characters, at most {MAX_CHARACTERS}"
            )
        if re.search("[\ud800-\udfff]", self.source):
            raise InputError(f"the {self.name} is not valid Unicode: it has half a character")

    @property
    def name(self) -> str:
        """The kind in words."""
        return {JSON_SCHEMA: "JSON schema", REGEX: "regular expression", LARK: "Lark grammar"}[
            self.kind
        ]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Self:
        """JSON that fits a schema, on one line with ``", "`` and ``": "`` between its parts.

        Properties are in the schema's order. The key ``"x-guidance"`` may hold other options of
        llguidance, such as ``{"whitespace_flexible": true}``. Raises InputError for text that is
        not a JSON object.
        """
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(f"the JSON schema is no JSON: {error}") from error
        value = parse(schema, "the JSON schema", InputError, MAX_DEPTH)
        if not isinstance(value, dict):
            raise InputError(f"the JSON schema is {json.dumps(value)[:60]}, expected an object")
        return cls(JSON_SCHEMA, json.dumps(value, ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that a regular expression matches as a whole (no look-around)."""
        return cls(REGEX, pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Text that a grammar describes in llguidance's dialect of Lark, from its rule ``start``."""
        return cls(LARK, grammar)


def check_numbers(source: str) -> None:
    """Raise InputError for a JSON schema, with which ``source`` begins, if its ``multipleOf`` would
    take minutes to compile, or for values and bounds beyond EXACT.

    A positive ``maximum`` may be larger.
    """
    schema = json.dumps(json.JSONDecoder(object_hook=_check_bounds).raw_decode(source)[0])
    multiples = map(Decimal, re.findall(r'"multipleOf": (-?[0-9][0-9.eE+-]*)', schema))
    if (
        math.lcm(
            *(int("".join(map(str, each.normalize().as_tuple().digits))) for each in multiples)
        )
        > MAX_MULTIPLE
    ):
        raise InputError(
            f"the JSON schema's multipleOf together allow multiples of more than {MAX_MULTIPLE} only"
        )


def _check_bounds(part: dict[str, Any]) -> dict[str, Any]:
    for key, most in (
        ("const", EXACT),
        ("enum", EXACT),
        ("maximum", math.inf),
        ("exclusiveMaximum", math.inf),
    ):
        numbers = re.findall(r'"(?:[^"\\]|\\.)*"|(-?[0-9][0-9.eE+-]*)', json.dumps(part.get(key)))
        if not all(-EXACT <= Decimal(number) <= most for number in numbers if number):
            raise InputError(
                f"the JSON schema's {key} has a number beyond 2^53, which would not be kept"
            )
    return part


class Grammar:
    """A structure's state in one answer.

    ``stops``: the tokens that end it; after one, nothing is forbidden.
    """

    def __init__(self, structure: Structure, matcher: Any, stops: Sequence[int]) -> None:
        self._structure = structure
        self._matcher = matcher
        self._stops = tuple(stops)
        self._ended = False
        self._forced: list[int] | None = None
        self._buffer: Scores | None = (
            None  # fresh memory for every token would cost more than the sums in it
        )

    def masked(self, scores: Scores) -> Scores:
        """Scores ``[V] float32`` with ``-inf`` for the tokens that may not come next, valid until
        the next call.

        Raises InputError if the grammar took more work than its limits allow.
        """
        if self._ended:
            return scores
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        if self._buffer is None:
            self._buffer = np.empty((len(bits), 8), np.float32)
        np.take(OF_BYTES, bits, axis=0, out=self._buffer, mode="clip")
        masked = self._buffer.reshape(-1)[: len(scores)]
        return np.add(masked, scores, out=masked)

    def accept(self, token: int) -> None:
        """Take in the next token of the answer."""
        self._forced = None
        self._ended = self._ended or token in self._stops
        if not self._ended:
            self._matcher.consume_token(token)
            self._check()

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return self._ended or self._matcher.validate_tokens([token]) == 1

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that must come next, in turn, as far as the tokenizer would write them so."""
        if self._forced is None:
            self._forced = [] if self._ended else self._find_forced()
        return self._forced

    def _find_forced(self) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        after = self._matcher.deep_copy() if tokens else self._matcher
        if after.consume_tokens(tokens) and after.is_stopped():
            tokens.append(self._stops[0])  # the likeliest of several
        return tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(
                f"the {self._structure.name} allows no answer: {_reason(self._matcher.get_error())}"
            )


def open_grammar(structure: Structure, tokenizer: ChatTokenizer, vocab: int) -> Grammar:
    """A structure at the beginning of an answer of a model with ``vocab`` tokens.

    Raises InputError for one that is wrong, too large or matches nothing, MissingExtraError without
    llguidance.
    """
    return Grammar(
        structure,
        _compiled(structure, _tokens_of(structure, tokenizer, vocab)).deep_copy(),
        tokenizer.stop_ids,
    )


def _tokens_of(structure: Structure, tokenizer: ChatTokenizer, vocab: int) -> Any:
    """llguidance's view of a tokenizer in a structure."""
    if structure.kind == REGEX:
        text = text_tokens_of_regex(tokenizer, structure.source)
    elif structure.kind == LARK:
        text = text_tokens_of_lark(tokenizer, structure.source)
    else:
        text = text_tokens(tokenizer)
    return grammar_tokens(tokenizer, vocab, text)


@lru_cache(maxsize=32)
def _compiled(structure: Structure, tokens: Any) -> Any:
    """The matcher of a structure before the first token."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        if structure.kind == JSON_SCHEMA:
            check_numbers(structure.source)
            grammar = LLMatcher.grammar_from_json_schema(structure.source, defaults=SPACING)
        elif structure.kind == REGEX:
            # llguidance's own function drops a last backslash, and escapes the line breaks that
            # (?x) ignores.
            escaped = re.sub(
                r"(\\.)|/", lambda found: found[1] or r"\/", structure.source, flags=re.DOTALL
            )
            grammar = LLMatcher.grammar_from_lark(f"start: /{escaped}/")
        else:
            for schema in re.split(r"%json\s*(?=\{)", structure.source)[1:]:
                check_numbers(schema)
            grammar = LLMatcher.grammar_from_lark(structure.source)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the {structure.name} cannot be used: {first_line(error)}") from error
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        # finds that nothing matches, and what the first token of every answer needs
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InputError(f"the {structure.name} cannot be used: {_reason(matcher.get_error())}")
    return matcher


def _reason(message: str) -> str:
    """The first line of what llguidance says, which names a text's place before and draws it after."""
    reason = next((line.strip() for line in message.splitlines() if line.strip()), "unknown")
    return "nothing matches it" if reason.startswith("NoExtension") else reason[:200]


def call_structure(
    tools: Sequence[Mapping[str, Any]], style: ToolStyle, tokenizer: ChatTokenizer
) -> Structure:
    """One call of one of the ``tools`` (OpenAI's form, see ``tool_of``) in a family's style.

    Raises InputError for no tools, for tools that have no such form, and for Gemma's style, which
    is no JSON.
    """
    if style is ToolStyle.GEMMA:
        raise InputError(
            "a call cannot be required from this family: it does not write calls in JSON"
        )
    if not tools:
        raise InputError("a call is required, but there are no tools")
    key = "parameters" if style is ToolStyle.LLAMA3 else "arguments"
    calls = []
    rules = []
    for number, (name, parameters) in enumerate(functions_of(tools).items()):
        schema = json.dumps({**arguments_schema(name, parameters), "x-guidance": SPACING})
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        calls.append(f"call{number}")
        rules.append(f'call{number}: {opening} arguments{number} "}}"')
        rules.append(f"arguments{number}: %json {schema}")
    start = " | ".join(calls)
    if style is ToolStyle.HERMES:
        opening, closing = (_mark(mark, tokenizer) for mark in style.value[0][:2])
        start = f'{opening} "\\n" ({start}) "\\n" {closing}'
    return Structure.lark("\n".join([f"start: {start}", *rules]))


def _mark(mark: str, tokenizer: ChatTokenizer) -> str:
    """A mark in a Lark rule: its token where it is an added one, special or not, else its text."""
    added = tokenizer.tokenizer.get_added_tokens_decoder().values()
    return mark if any(token.content == mark for token in added) else json.dumps(mark)
