"""One call as a model writes it, in JSON or in the form of the Gemma family."""

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
"""What the families call a call's arguments."""
BESIDE = {NAME, "type", "id"}
"""The keys of a call that has none."""


class Marks(NamedTuple):
    """What is before and after a call, and around its strings."""

    opening: str
    closing: str
    quote: str = '"'


@dataclass(frozen=True)
class Call:
    """A call of a function.

    ``arguments`` can always be written as JSON: a number beyond float64 is the largest there is.
    ``text``: their JSON as the model wrote it.
    """

    name: str
    arguments: dict[str, Any]
    text: str = field(default="{}", compare=False, repr=False)


_SPACE = re.compile(r"[ \t\n\r]*")
_BARE_KEY = re.compile(r"([{,]\s*)([\w.\-]+)\s*:")
_GEMMA_CALL = re.compile(r"\s*call:\s*([\w.\-]+)\s*(\{.*\})?\s*", re.DOTALL)


def read_json_call(text: str, at: int, bare: bool = False) -> tuple[Call | None, int]:
    """The call in the JSON object that begins at ``at``, and where the text after it begins.

    ``bare``: an object without arguments is none, as there is nothing else that says so.
    """
    begin = _after_space(text, at)
    try:
        members, end = _members(text, begin)
    except (ValueError, RecursionError):
        return None, at
    return _call(members, bare), _after_space(text, end)


def read_gemma_call(text: str, at: int, marks: Marks) -> tuple[Call | None, int]:
    """The call of the Gemma family that begins at ``at``, and where the text after it begins."""
    inside, closing, _ = text[at:].partition(marks.closing)
    body = _GEMMA_CALL.fullmatch(inside)
    if body is None:
        return None, at
    # Every other piece is a string, the rest is JSON but for its keys.
    pieces = (body[2] or "{}").split(marks.quote)
    pieces[::2] = [_BARE_KEY.sub(r'\1"\2":', piece) for piece in pieces[::2]]
    pieces[1::2] = map(json.dumps, pieces[1::2])
    written = "".join(pieces)
    try:
        return Call(body[1], json_value(written), written), at + len(inside + closing)
    except (ValueError, RecursionError):
        return None, at


def json_value(text: str) -> Any:
    """The value of a JSON text, without infinite numbers; raises ValueError, RecursionError."""
    return _JSON.decode(text)


def ends_in_string(text: str, quote: str) -> bool:
    """Whether a call that ``text`` is the beginning of goes on within a string."""
    if quote != '"':
        return text.count(quote) % 2 == 1
    try:
        _JSON.raw_decode(text, _after_space(text, 0))
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The values of a JSON object, each with its own text, and where the object ends; raises
    ValueError, RecursionError.
    """
    found: dict[str, tuple[Any, str]] = {}
    at = _after(text, at, "{")
    if text.startswith("}", at):
        return found, at + 1
    while True:
        key, end = _JSON.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError(f"a key is {type(key).__name__}")
        at = _after(text, end, ":")
        value, end = _JSON.raw_decode(text, at)
        found[key] = (value, text[at:end])
        at = _after_space(text, end)
        if text.startswith("}", at):
            return found, at + 1
        at = _after(text, at, ",")


def _after(text: str, at: int, character: str) -> int:
    """Where the text goes on after a character and the white space around it."""
    at = _after_space(text, at)
    if not text.startswith(character, at):
        raise ValueError(f"no {character} at {at}")
    return _after_space(text, at + 1)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _call(members: Mapping[str, tuple[Any, str]], bare: bool) -> Call | None:
    name, _ = members.get(NAME, (None, ""))
    if not isinstance(name, str):
        return None
    key = next((key for key in ARGUMENTS if key in members), None)
    if key is None:
        return Call(name, {}) if members.keys() <= BESIDE and not bare else None
    value, text = members[key]
    if isinstance(value, str):  # their JSON, as OpenAI sends it
        text = value.strip() or "null"
        try:
            value = json_value(text)
        except (ValueError, RecursionError):
            return None
    if value is None:
        return Call(name, {})
    return Call(name, value, text) if isinstance(value, dict) else None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _whole(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # of more digits than Python converts
        return _finite(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite, parse_int=_whole)
