"""What form an answer must have: a JSON schema, a regular expression, or a Lark grammar."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ssdevice import arguments
from ssdevice.errors import InputError
from ssdevice.strict_json import parse

JSON_SCHEMA, REGEX, LARK = KINDS = ("json_schema", "regex", "lark")
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 100
"""Levels of a JSON schema; llguidance's own limit is a little higher."""
MAX_MULTIPLE = 100_000
"""Of the least common multiple of all ``multipleOf``: an automaton has that many states, and takes 0.5 s."""
_MULTIPLES = re.compile(r'"multipleOf": (-?[0-9][0-9.eE+-]*)')


@dataclass(frozen=True)
class Structure:
    """The form of an answer, for ``Sampling.structure``: ``kind`` is one of KINDS, ``source`` its text.

    Raises InputError for a source that is empty, too long or no Unicode. What else is wrong with it is said when an
    answer is asked for.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"structure kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if not arguments.text(self.kind, self.source).strip():
            raise InputError(f"the {self.name} is empty")
        if len(self.source) > MAX_CHARACTERS:
            raise InputError(f"the {self.name} has {len(self.source)} characters, at most {MAX_CHARACTERS}")
        try:
            self.source.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"the {self.name} is not valid Unicode: {error}") from error

    @property
    def name(self) -> str:
        """The kind in words."""
        return {JSON_SCHEMA: "JSON schema", REGEX: "regular expression", LARK: "Lark grammar"}[self.kind]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Structure:
        """JSON on one line that a schema describes, with ``", "`` and ``": "`` between its parts.

        Objects have their properties in the schema's order. The schema's key ``"x-guidance"`` may hold other options of
        llguidance, such as ``{"whitespace_flexible": true}``. Raises InputError for text that is not a JSON object.
        """
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(f"the JSON schema is no JSON: {error}") from error
        if len(schema) > MAX_CHARACTERS:
            raise InputError(f"the JSON schema has {len(schema)} characters, at most {MAX_CHARACTERS}")
        value = parse(schema, "the JSON schema", InputError, MAX_DEPTH)
        if not isinstance(value, dict):
            raise InputError(f"the JSON schema is {json.dumps(value)[:60]}, expected an object")
        return cls(JSON_SCHEMA, json.dumps(value, ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Structure:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """Text that a regular expression matches from its first character to its last (no look-around)."""
        return cls(REGEX, pattern)

    @classmethod
    def lark(cls, grammar: str) -> Structure:
        """Text that a grammar describes in llguidance's dialect of Lark, from its rule ``start``."""
        return cls(LARK, grammar)


def check_multiples(schema: str) -> None:
    """Raise InputError for a JSON schema whose ``multipleOf`` would take minutes to compile."""
    digits = [Decimal(number).normalize().as_tuple().digits for number in _MULTIPLES.findall(schema)]
    if math.lcm(*(int("".join(map(str, each))) for each in digits)) > MAX_MULTIPLE:
        raise InputError(f"the JSON schema's multipleOf together allow multiples of more than {MAX_MULTIPLE} only")
