"""JSON that all readers interpret alike.

No key is repeated, and no number or depth is one that some readers refuse.
"""

import difflib
import json
import re
from collections.abc import Collection
from typing import Any

from ssdevice.errors import ConfigError, InputError, SSDeviceError

STRINGS_AND_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def utf8(
    data: bytes, where: str, error: type[SSDeviceError] = InputError, codec: str = "utf-8-sig"
) -> str:
    """UTF-8 text, by default without a byte order mark.

    Raises ``error``, which names the first byte that is not.
    """
    try:
        return data.decode(codec)
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8 text (byte {problem.start})") from problem


def parse(
    data: bytes | str,
    where: str,
    error: type[SSDeviceError] = ConfigError,
    depth: int | None = None,
) -> Any:
    """The value in a JSON text (bytes are UTF-8).

    ``depth``: the most levels of lists and objects allowed. Raises ``error`` with one line that
    begins with ``where``.
    """

    def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise error(f"{where}: key {key[:60]!r} appears twice in one object")
            found[key] = value
        return found

    try:
        text = utf8(data, where, error, "utf-8") if isinstance(data, bytes) else data
        if depth is not None and _is_deeper(text, depth):  # before parsing: the parser recurses
            raise error(f"{where}: nested deeper than {depth} levels")
        return json.loads(text, object_pairs_hook=unrepeated)
    except json.JSONDecodeError as problem:
        raise error(
            f"{where}: not JSON (line {problem.lineno}, column {problem.colno}: {problem.msg}): "
            f"{problem.doc.strip()[:60]!r}"
        ) from problem
    except ValueError as problem:  # an integer of more digits than Python converts
        raise error(f"{where}: not JSON this tool can use ({problem})") from problem
    except RecursionError as problem:
        raise error(f"{where}: JSON is nested too deeply") from problem


def unknown_key(key: str, known: Collection[str]) -> str:
    """What to say of a key that is none of ``known``: the nearest of them, or all."""
    near = difflib.get_close_matches(key, known, 1)
    if near:
        return f"unknown key {key[:60]!r}, did you mean {near[0]!r}?"
    return f"unknown key {key[:60]!r}; known keys are {', '.join(known)}"


def _is_deeper(text: str, depth: int) -> bool:
    """Whether lists and objects in a JSON text are nested deeper than ``depth`` levels."""
    level = 0
    for found in STRINGS_AND_BRACKETS.finditer(text):
        if found[0] in ("[", "{"):
            level += 1
        elif found[0] in ("]", "}"):
            level -= 1
        if level > depth:
            return True
    return False
