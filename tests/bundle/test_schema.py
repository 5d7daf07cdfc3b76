"""The published JSON Schema says of a manifest what its dataclasses say; ``python -m
tests.bundle.test_schema`` writes it anew.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from ssdevice.bundle.manifest import Manifest
from ssdevice.config import load_strict, to_json
from ssdevice.contract import PLAIN, PREFILL, CacheForm, Geometry, functions
from ssdevice.errors import ConfigError
from ssdevice.tree import Tree
from tests.bundle.samples import leaves, sample_document

SCHEMA = Path(__file__).resolve().parents[2] / "ssdevice" / "bundle" / "manifest.schema.json"
SIMPLE = {int: "integer", str: "string", float: "number", bool: "boolean"}


def schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a type that ``load_strict`` reads."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if origin in (typing.Union, types.UnionType):
        return {
            "anyOf": [
                {"type": "null"} if a is types.NoneType else schema_of(a, definitions) for a in args
            ]
        }
    if origin is tuple:
        return {"type": "array", "items": schema_of(args[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(args[1], definitions)}
    if hint is Tree:
        return {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    if issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = None  # its place
        definitions[hint.__name__] = object_schema(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def object_schema(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a dataclass: its types with the rules of its fields' metadata."""
    hints = typing.get_type_hints(cls)
    properties = {}
    required = []
    for field in dataclasses.fields(cls):
        properties[field.name] = merged(schema_of(hints[field.name], definitions), field.metadata)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def merged(schema: dict[str, Any], rule: Any) -> dict[str, Any]:
    """A schema with a rule's bounds put in; those of an optional value go to the value."""
    if "anyOf" in schema and rule:
        return {"anyOf": [s if s == {"type": "null"} else merged(s, rule) for s in schema["anyOf"]]}
    result = dict(schema)
    if "enum" in rule:
        return {"enum": rule["enum"]}
    for key, value in rule.items():
        nested = key in ("items", "additionalProperties", "propertyNames")
        result[key] = merged(result.get(key, {}), value) if nested else value
    return result


def manifest_schema() -> dict[str, Any]:
    """What the schema file holds."""
    definitions: dict[str, Any] = {}
    top = object_schema(Manifest, definitions)
    # With defaults in the dataclass, for writers; no reader does without them.
    top["required"] = ["schema_version", *top["required"], "files"]
    top["properties"] = {
        "schema_version": top["properties"].pop("schema_version"),
        **top["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Manifest of an ssdevice bundle",
        "description": "manifest.json. Readers also check what a schema cannot say: that functions "
        "follow from the geometry, that names do not collide, and that apps and roles refer to "
        "listed files.",
        **top,
        "$defs": dict(sorted(definitions.items())),
    }


def test_schema_file_is_what_the_dataclasses_say() -> None:
    assert json.loads(SCHEMA.read_text("utf-8")) == manifest_schema(), f"run python {__file__}"


WRONG: tuple[Any, ...] = (None, True, "../x", -1, 10**20, 1.5, [], {}, [1], {"a": 1}, "ä" * 70000)


def small_document() -> dict[str, Any]:
    """A manifest of plain decoding: the validator is slow."""
    document = sample_document()
    geometry = Geometry(
        layers=2,
        kv_heads=1,
        head_dim=8,
        vocab=512,
        gamma=0,
        k=1,
        tree=Tree.root_only(),
        context=64,
        chunk=16,
    )
    specs = functions(geometry, CacheForm.INTERNAL, "float32")
    document |= {
        "mode": None,
        "msa_layers": 0,
        "cache": "state",
        "apps": document["apps"][:1],
        "default_app": "base",
    }
    document |= {
        "geometry": to_json(geometry),
        "functions": to_json([specs[PREFILL], specs[PLAIN]]),
    }
    load_strict(Manifest, document, "manifest")
    return document


def test_schema_refuses_what_the_dataclasses_refuse_by_type_and_bound() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(manifest_schema())
    validator = jsonschema.Draft202012Validator(manifest_schema())
    document = small_document()
    assert validator.is_valid(document) and validator.is_valid(sample_document())
    both = 0
    places = [place for place in leaves(document)[1:] if place[:2] != ("functions", 1)]
    for number, place in enumerate(places):
        for wrong in (WRONG * 2)[3 * number % len(WRONG) :][:3]:
            changed = copy.deepcopy(document)
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = wrong
            try:
                load_strict(Manifest, changed, "manifest")
                taken = True
            except ConfigError:
                taken = False
            by_schema = validator.is_valid(changed)
            # The dataclasses also check how values fit each other; what they take, the schema
            # takes.
            assert by_schema or not taken, (place, wrong)
            both += not by_schema and not taken
    assert both > 100


def test_schema_covers_a_manifest_that_was_written() -> None:
    document = sample_document()
    assert to_json(load_strict(Manifest, document, "manifest")) == document
    assert set(document) == set(manifest_schema()["properties"])


if __name__ == "__main__":
    SCHEMA.parent.mkdir(exist_ok=True)
    SCHEMA.write_text(
        json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
