"""Which fields a manifest may leave out, and what they are then, as the dataclasses say."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from ssdevice.bundle.integrity import MANIFEST_FILE
from ssdevice.bundle.manifest import Manifest
from ssdevice.config import to_json

NEEDED = ("schema_version", "files")
"""Fields of ``Manifest`` with defaults for writers; no reader does without them."""


def default_values(hint: Any) -> dict[str, Any]:
    """The optional fields of a dataclass with their JSON values; none of another type."""
    hint = _some(hint)
    if not dataclasses.is_dataclass(hint):
        return {}
    fields = [
        field
        for field in dataclasses.fields(hint)
        if hint is not Manifest or field.name not in NEEDED
    ]
    made = {
        field.name: field.default_factory() for field in fields if callable(field.default_factory)
    }
    made |= {
        field.name: field.default for field in fields if field.default is not dataclasses.MISSING
    }
    return {name: to_json(value) for name, value in made.items()}


def with_defaults(hint: Any, value: Any) -> Any:
    """A JSON value of a type that ``load_strict`` reads, with the defaults that it leaves out."""
    inside = {key: with_defaults(kind, item) for key, kind, item in _parts(hint, value)}
    if isinstance(value, dict):
        return {**default_values(hint), **value, **inside}
    return list(inside.values()) if inside else value


def optional_places(
    hint: Any, value: Any, at: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The place of every optional field in a JSON value, with its default."""
    if isinstance(value, dict):
        yield from (
            ((*at, name), default)
            for name, default in default_values(hint).items()
            if name in value
        )
    for key, kind, item in _parts(hint, value):
        yield from optional_places(kind, item, (*at, key))


def leave_out_defaults(folder: Path) -> int:
    """Remove from the manifest of a bundle what it may leave out without another meaning; how many
    fields that were.
    """
    file = folder / MANIFEST_FILE
    document = json.loads(file.read_text("utf-8"))
    removed = 0
    for (*above, last), default in reversed([*optional_places(Manifest, document)]):
        parent = reduce(getitem, above, document)
        if parent[last] == default:
            del parent[last]
            removed += 1
    file.write_text(json.dumps(document), "utf-8")
    return removed


def _some(hint: Any) -> Any:
    """A type without None."""
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


def _parts(hint: Any, value: Any) -> list[tuple[Any, Any, Any]]:
    """Key, type and value of everything directly in a JSON value."""
    hint = _some(hint)
    args = typing.get_args(hint)
    if isinstance(value, list) and args:
        return [(i, args[0], item) for i, item in enumerate(value)]
    if isinstance(value, dict) and args:
        return [(key, args[1], item) for key, item in value.items()]
    if isinstance(value, dict) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return [(key, hints[key], item) for key, item in value.items()]
    return []
