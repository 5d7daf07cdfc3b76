"""Checks of what callers of the Python API pass: a value of the wrong type is an InputError that
names it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from ssdevice.errors import InputError


def _wrong(name: str, value: Any, expected: str) -> InputError:
    return InputError(f"{name} is {type(value).__name__} ({repr(value)[:60]}), expected {expected}")


def _items(name: str, value: Any, kind: Any, members: str) -> list[Any]:
    """The items of a list, which a text is not; ``members``: what they are, for the message."""
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, kind):
        raise _wrong(name, value, f"a list of {members}")
    return list(value)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """The strings of a list or another iterable; a string is one of them, not its characters."""
    if isinstance(value, str):
        return (value,)
    return tuple(
        text(f"{name}[{i}]", item)
        for i, item in enumerate(_items(name, value, Iterable, "strings"))
    )


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The value, if it is a whole number from ``least`` to ``most``: also one of NumPy's, but
    neither True nor 2.0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(name, value, "a whole number")
    number = int(value)
    too_small = least is not None and number < least
    too_large = most is not None and number > most
    if most is None and too_small:
        raise InputError(f"{name} is {number}, expected {least} or more")
    if too_small or too_large:
        raise InputError(f"{name} is {number}, expected {least} to {most}")
    return number


def wholes(name: str, value: Any) -> list[int]:
    """The whole numbers of a list, an array or another iterable."""
    items = _items(name, value, Iterable, "whole numbers")
    if set(map(type, items)) <= {int}:  # as most are; a prompt has thousands
        return items
    return [whole(f"{name}[{i}]", item) for i, item in enumerate(items)]


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """The value, if it is an object of JSON: a dict or another mapping."""
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object")
    return value


def objects(name: str, value: Any) -> list[Mapping[str, Any]]:
    return [
        mapping(f"{name}[{i}]", item)
        for i, item in enumerate(_items(name, value, Sequence, "objects"))
    ]


def path(name: str, value: Any) -> Path:
    """The path that a string or path object names; not what no file can be called, such as a text
    with a NUL.
    """
    try:
        found = Path(value)
        os.access(found, os.F_OK)
    except (TypeError, ValueError) as error:
        raise _wrong(name, value, "a path") from error
    return found
