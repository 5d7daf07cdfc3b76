"""The form an answer must have: a JSON schema, a regular expression or a Lark grammar, and its
state in an answer.

The state advances only by accepted tokens, so nothing has to be taken back where drafts are
rejected.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np

from ssdevice import arguments
from ssdevice.errors import InputError, needs_extra
from ssdevice.runtime.sampling.followers import Source, followers_of
from ssdevice.runtime.sampling.grammar_tokens import (
    Spelled,
    spelled_anywhere,
    spelled_in_lark,
    spelled_in_regex,
)
from ssdevice.runtime.sampling.lark import MAX_DEPTH, Lark
from ssdevice.runtime.sampling.matching import Following, GrammarError
from ssdevice.runtime.sampling.noise import Scores
from ssdevice.runtime.sampling.schemas import SPACING, Schema
from ssdevice.strict_json import parse
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tools import ToolStyle, arguments_schema, functions_of

JSON_SCHEMA, REGEX, LARK = KINDS = ("json_schema", "regex", "lark")
MAX_CHARACTERS = 1 << 20
EXTRA = "structure"
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
        """Text that a grammar in llguidance's dialect of Lark describes, from its ``start``."""
        return cls(LARK, grammar)


class Grammar:
    """A structure's state in one answer.

    ``stops``: the tokens that end it; after one, nothing is forbidden. Methods raise InputError if
    the grammar took more than it is allowed.
    """

    def __init__(self, structure: Structure, following: Following, stops: Sequence[int]) -> None:
        self._structure = structure
        self._following = following
        self._stops = tuple(stops)
        self._ended = False
        self._forced: list[int] | None = None
        # Fresh memory for every token would cost more than the sums in it.
        self._buffer: Scores | None = None

    def masked(self, scores: Scores) -> Scores:
        """Scores ``[V] float32`` with ``-inf`` for the tokens that may not come next, valid until
        the next call.
        """
        if self._ended:
            return scores
        try:
            bits = np.frombuffer(self._following.mask(), np.uint8)
        except GrammarError as error:
            raise self._failed(error) from error
        if self._buffer is None:
            self._buffer = np.empty((len(bits), 8), np.float32)
        np.take(OF_BYTES, bits, axis=0, out=self._buffer, mode="clip")
        masked = self._buffer.reshape(-1)[: len(scores)]
        return np.add(masked, scores, out=masked)

    def accept(self, token: int) -> None:
        """Take in the next token of the answer."""
        self._forced = None
        if token in self._stops:
            self._ended = True
        if self._ended:
            return
        try:
            self._following.accept(token)
        except GrammarError as error:
            raise self._failed(error) from error

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        if self._ended:
            return True
        try:
            return self._following.allows(token)
        except GrammarError as error:
            raise self._failed(error) from error

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that must come next, in turn, as far as the tokenizer would write them so."""
        if self._ended:
            return []
        if self._forced is None:
            try:
                self._forced = self._following.forced()
            except GrammarError as error:
                raise self._failed(error) from error
        return self._forced

    def close(self) -> None:
        """The answer has ended: free what it takes."""
        self._ended = True
        self._following.close()

    def _failed(self, error: GrammarError) -> InputError:
        return InputError(f"the {self._structure.name} allows no answer: {error}")


def open_grammar(structure: Structure, tokenizer: ChatTokenizer, vocab: int) -> Grammar:
    """A structure at the beginning of an answer of a model with ``vocab`` tokens.

    Threads may call this at the same time. Raises InputError for a structure that is wrong, too
    large or matches nothing, MissingExtraError without llguidance.
    """
    with needs_extra(EXTRA):
        import llguidance  # noqa: F401
    read = _read(structure)
    followers = followers_of(tokenizer, vocab, _spelled(structure, tokenizer))
    try:
        following = followers.follow(read)
    except GrammarError as error:
        reason = str(error)
        if structure.kind == REGEX:
            # A place in the grammar that it was put into.
            reason = re.sub(r"^at \d+\(\d+\): ", "", reason)
        raise InputError(f"the {structure.name} cannot be used: {reason}") from error
    return Grammar(structure, following, tokenizer.stop_ids)


def _spelled(structure: Structure, tokenizer: ChatTokenizer) -> Spelled:
    """The added tokens that are text in a structure."""
    if structure.kind == REGEX:
        return spelled_in_regex(tokenizer, structure.source)
    if structure.kind == LARK:
        return spelled_in_lark(tokenizer, structure.source)
    return spelled_anywhere(tokenizer)


@lru_cache(maxsize=4)
def _read(structure: Structure) -> Source:
    """A structure as llguidance takes it. Raises InputError for what it would take wrongly."""
    if structure.kind == JSON_SCHEMA:
        schema = Schema(json.loads(structure.source))
        return Source("json", schema.written(), small=schema.small, open_keys=schema.open_keys)
    if structure.kind == REGEX:
        # llguidance's own function drops a last backslash, and escapes the line breaks that (?x)
        # ignores.
        escaped = re.sub(
            r"(\\.)|/", lambda found: found[1] or r"\/", structure.source, flags=re.DOTALL
        )
        return Source("lark", f"start: /{escaped}/")
    lark = Lark(structure.source)
    return Source("lark", lark.written(), small=lark.small)


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
