"""JSON schemas before they are compiled: what llguidance would take wrongly, and their depth."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from ssdevice.errors import InputError

MAX_LEVELS = 1000
"""Of schemas within schemas, through references, and of a grammar's rules within rules."""
MAX_WRITTEN = 1 << 22
"""Characters: an expression is 20 times longer than a format's name."""
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
ESCAPES = 'nrbtf\\"'
"""What may follow a backslash in strings.

Without ``\\u0061``, which is another way to write a key that the grammar takes for another key.
"""
SMALL_LEVELS = 20
"""llguidance takes 9 kB of the stack for a level; threads have 512 kB where they have least."""
SMALL_CHARACTERS = 10_000
SMALL_COUNT = 1000
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_ZONE})"
FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}"}
"""Expressions for formats that llguidance takes too widely: it lets each February have 29 days, and
each minute 61 seconds.
"""
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not")
_SEVERAL = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOTES = frozenset(
    ("$schema", "$defs", "definitions", "title", "description", "default", "examples", "$comment")
)
_SMALL = frozenset(
    ("type", "properties", "required", "additionalProperties", "items", "enum", "const", "format")
)
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_SMALL_NUMBER = re.compile("-?[0-9.]{1,20}")
_SMALL_FORMATS = (*FORMATS, "uuid", "ipv4", "email")


@dataclass(frozen=True)
class Schema:
    """A JSON schema, ``value``, and the schemas in it.

    ``what``: its name in messages. ``spacing``: options of llguidance that it may change.
    """

    value: Mapping[str, Any]
    what: str = "JSON schema"
    spacing: Mapping[str, Any] = field(default_factory=lambda: SPACING)

    def written(self) -> str:
        """The schema's text for llguidance, which takes it as it is meant.

        Raises InputError for what llguidance would take in another way, or only in minutes.
        """
        self._check_levels()
        self._check_multiples()
        changed: dict[int, dict[str, Any]] = {}
        for schema in self._all.values():
            self._check_numbers(schema)
            pattern = FORMATS.get(schema["format"]) if _is_text(schema.get("format")) else None
            if pattern is not None:
                changed[id(schema)] = _with_pattern(schema, f"^(?:{pattern})$")
        value = _replaced(self.value, changed) if changed else dict(self.value)
        text = json.dumps({**value, "x-guidance": self._options()}, ensure_ascii=False)
        if len(text) > MAX_WRITTEN:
            raise InputError(
                f"the {self.what} has {len(text)} characters with its dates and times as "
                f"expressions, at most {MAX_WRITTEN}"
            )
        return text

    def check_counts(self) -> None:
        """Raise InputError if keys of any name are counted, of which one may come twice.

        Where the whole answer is JSON, none does: see ``keys``.
        """
        for schema in self._all.values():
            least = schema.get("minProperties")
            if not isinstance(least, int | float) or not _is_open(schema):
                continue
            required = schema.get("required")
            named = len(set(filter(_is_text, required))) if isinstance(required, list) else 0
            if least > named + 1:
                raise InputError(
                    f"the {self.what}'s minProperties {least} counts keys of any name, which may "
                    'come twice: set "additionalProperties" to false, or list required keys'
                )

    @cached_property
    def open_keys(self) -> bool:
        """Whether an answer may have an object with keys that the schema does not name."""
        for schema in self._all.values():
            if _may_be("object", schema) and _is_open(schema):
                return True
            if _may_be("array", schema) and not isinstance(schema.get("items"), dict):
                return True
            if True in self._within(schema) or not self._refers_within(schema):
                return True
        return False

    @cached_property
    def small(self) -> bool:
        """Whether compiling and following it takes little, whatever it says.

        Its expressions are then texts, numbers, names and strings of bounded length, of which none
        intersects another but strings with the names that they may not be: automata of a few states
        for each character. Nothing refers to itself, and levels are few.
        """
        if len(json.dumps(self.value)) > SMALL_CHARACTERS:
            return False
        levels = self._levels
        if levels is None or levels > SMALL_LEVELS:
            return False
        if self.value.get("x-guidance", SPACING) != SPACING:  # it may have expressions
            return False
        return all(
            _is_small(schema) and self._refers_within(schema) for schema in self._all.values()
        )

    @cached_property
    def _all(self) -> dict[int, dict[str, Any]]:
        """The schemas in this one that are objects, by their ``id``."""
        found: dict[int, dict[str, Any]] = {}
        waiting: list[Any] = [self.value]
        while waiting:
            schema = waiting.pop()
            if isinstance(schema, dict) and id(schema) not in found:
                found[id(schema)] = schema
                waiting.extend(self._within(schema))
        return found

    def _within(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """The schemas that a schema has or refers to."""
        for key in _ONE:
            if key in schema:
                yield schema[key]
        for key in _SEVERAL:
            if isinstance(schema.get(key), list):
                yield from schema[key]
        for key in _NAMED:
            if isinstance(schema.get(key), dict):
                yield from schema[key].values()
        if "$ref" in schema:
            yield self._referred(schema["$ref"])

    def _referred(self, reference: Any) -> Any:
        """What a reference within this document means; None for others, which are refused later."""
        if not _is_text(reference) or not reference.startswith("#"):
            return None
        value: Any = self.value
        for part in reference[1:].split("/")[1:]:
            key = _unquoted(part).replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return value

    def _refers_within(self, schema: Mapping[str, Any]) -> bool:
        """Whether a schema refers to one in this document, if to any."""
        return "$ref" not in schema or isinstance(self._referred(schema["$ref"]), dict)

    @cached_property
    def _heights(self) -> tuple[int, bool]:
        """How many schemas are within one another, and whether one is within itself."""
        graph = {}
        for key, schema in self._all.items():
            inner = [each for each in self._used(schema) if isinstance(each, dict)]
            graph[key] = [id(each) for each in inner]
        return height(graph, id(self.value))

    def _used(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """The schemas that are compiled within a schema; definitions where it refers to one."""
        used = {key: schema[key] for key in schema if key not in ("$defs", "definitions")}
        return self._within(used)

    @property
    def _levels(self) -> int | None:
        levels, recursive = self._heights
        return None if recursive else levels

    def _check_levels(self) -> None:
        levels, _ = self._heights
        if levels > MAX_LEVELS:
            raise InputError(
                f"the {self.what} is {levels} levels deep through its references, at most "
                f"{MAX_LEVELS}"
            )

    def _check_multiples(self) -> None:
        multiple = 1
        for schema in self._all.values():
            number = schema.get("multipleOf")
            if _is_number(number) and number != 0:
                digits = Decimal(str(number)).normalize().as_tuple().digits
                multiple = math.lcm(multiple, int("".join(map(str, digits))))
            if multiple > MAX_MULTIPLE:
                raise InputError(
                    f"the {self.what}'s multipleOf together allow multiples of more than "
                    f"{MAX_MULTIPLE} only"
                )

    def _check_numbers(self, schema: Mapping[str, Any]) -> None:
        """A positive ``maximum`` may be larger than EXACT."""
        for key in ("const", "enum", "maximum", "exclusiveMaximum"):
            most = EXACT if key in ("const", "enum") else math.inf
            for number in _numbers(schema.get(key)):
                if not -EXACT <= number <= most:
                    raise InputError(
                        f"the {self.what}'s {key} has a number beyond 2^53, which would not be kept"
                    )

    def _options(self) -> dict[str, Any]:
        given = self.value.get("x-guidance", {})
        if not isinstance(given, dict):
            raise InputError(
                f"the {self.what}'s x-guidance is {json.dumps(given)[:60]}, expected an object"
            )
        if given.get("json_allow_general_unicode_escapes") or "u" in str(
            given.get("json_allowed_escapes") or ""
        ):
            raise InputError(
                f"the {self.what}'s x-guidance allows \\u escapes, with which a key could be "
                "written in two ways"
            )
        options = {**self.spacing, **given}
        options["json_allowed_escapes"] = given.get("json_allowed_escapes") or ESCAPES
        return options


def height(graph: Mapping[Any, list[Any]], root: Any) -> tuple[int, bool]:
    """The longest way down a graph from ``root``, and whether a way comes back to itself.

    A node that is on the way already ends it, as it does where a compiler recurses.
    """
    heights: dict[Any, int] = {}
    open_nodes: set[Any] = set()
    recursive = False
    way: list[tuple[Any, bool]] = [(root, False)]
    while way:
        node, entered = way.pop()
        inner = graph.get(node, [])
        if entered:
            open_nodes.discard(node)
            heights[node] = 1 + max((heights.get(each, 0) for each in inner), default=0)
        elif node in open_nodes:
            recursive = True
        elif node not in heights:
            open_nodes.add(node)
            way.append((node, True))
            way.extend((each, False) for each in reversed(inner))
    return heights[root], recursive


def _is_open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is not False or "patternProperties" in schema


def _may_be(kind: str, schema: Mapping[str, Any]) -> bool:
    """Whether values may be of a type, other than those that the schema lists."""
    if "enum" in schema or "const" in schema:
        return False
    kinds = schema.get("type")
    if kinds is None:
        # Where it refers to others, they say what values are.
        return not schema.keys() & {"$ref", "anyOf", "oneOf"}
    return kinds == kind or (isinstance(kinds, list) and kind in kinds)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unquoted(part: str) -> str:
    """A part of a reference without its percent signs."""
    octets = re.sub(
        b"%([0-9a-fA-F]{2})", lambda found: bytes([int(found[1], 16)]), part.encode("utf-8")
    )
    return octets.decode("utf-8", "replace")


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a value, at any depth."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)
        elif _is_number(each):
            yield each


def _with_pattern(schema: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """A schema with an expression in place of its format."""
    rest = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in rest:
        return {**rest, "pattern": pattern}
    known = rest.get("allOf")
    if not isinstance(known, list):
        known = []
    return {**rest, "allOf": [*known, {"pattern": pattern}]}


def _replaced(value: Any, changed: Mapping[int, Any]) -> Any:
    """A value with others in the place of some in it; only schemas are changed, never data."""
    if isinstance(value, list):
        return [_replaced(each, changed) for each in value]
    if not isinstance(value, dict):
        return value
    source = changed.get(id(value), value)
    return {key: _replaced(each, changed) for key, each in source.items()}


def _is_small(schema: Mapping[str, Any]) -> bool:
    keys = schema.keys() - _NOTES - {"x-guidance"}
    if "$ref" in keys or "anyOf" in keys:
        # Beside other keywords they would be merged with them.
        return len(keys) == 1
    if "format" in keys and (schema["format"] not in _SMALL_FORMATS or keys & _COUNTS):
        return False
    for key in keys & _COUNTS:
        if not _is_number(schema[key]) or not 0 <= schema[key] <= SMALL_COUNT:
            return False
    for key in keys & _BOUNDS:
        if not _is_number(schema[key]) or not _SMALL_NUMBER.fullmatch(str(schema[key])):
            return False
    return keys <= _SMALL | _COUNTS | _BOUNDS
