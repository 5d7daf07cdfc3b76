"""JSON documents changed by type: what a parser, a size check or a path check may trip over."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

Place = tuple[Any, ...]

RAW = "@@raw@@"
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    255,
    256,
    257,
    1023,
    1024,
    4096,
    65535,
    65536,
    1 << 20,
    (1 << 20) + 1,
    2**31 - 1,
    2**31,
    2**32,
    2**42,
    2**42 + 1,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(10**30),
    0.0,
    -0.0,
    1.0,
    1.5,
    1e308,
    5e-324,
    True,
    False,
    None,
)
TEXTS = (
    "",
    " ",
    "\n",
    "\0",
    "a\0b",
    "\u202etxt",
    "é",
    "é",
    "漢字",
    "\U0001f600",
    "\x1b[31m",
    "\r",
    "\u2028",
    "x" * 300,
    "x" * 70_000,
    "../..",
    "../manifest.json",
    "/etc/passwd",
    "C:\\Windows",
    "\\\\host\\share",
    "a/../b",
    "./a",
    "a//b",
    "a/",
    "~root",
    "con",
    "NUL.txt",
    "com1",
    "file:///etc/passwd",
    "http://127.0.0.1/",
    "%2e%2e%2f",
    "manifest.json",
    "MANIFEST.JSON",
    "weights.bin",
    "Weights.bin",
    "step.onnx",
    "tokenizer.json",
    "{{ 1/0 }}",
    "{% for",
    "None",
    "NaN",
    "step",
    "plain",
    "onnx",
)
DEEP = 3000
# As text, since no object of Python's writes them.
LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1" * 5000,
    "-0",
    "1E400",
    '"\\ud800"',
    '"\\udc00\\ud800"',
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "[" * 40 + "]" * 40,
    '{"a":1,"a":2}',
    "nul",
    "01",
    "",
    "'a'",
    "[1,]",
    "/*c*/1",
)
WRAPS = ("list", "dict", "text", "deep")


def places(value: Any, at: Place = ()) -> list[Place]:
    """The place of every value in a document."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(place for key, item in inside for place in places(item, (*at, key)))]


def get(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def put(document: Any, place: Place, value: Any) -> None:
    get(document, place[:-1])[place[-1]] = value


def choose_place(rng: Random, document: Any) -> Place:
    """A place below the root, near the top as often as deep inside."""
    found = places(document)[1:]
    if rng.random() < 0.5:
        found = [place for place in found if len(place) <= rng.randint(1, 3)] or found
    return rng.choice(found)


def mutate(  # noqa: C901  # a kind each; in another order seeds would mean other documents
    rng: Random, document: dict[str, Any], within: Sequence[str] = ()
) -> tuple[bytes, str]:
    """The document with one to three values changed, as bytes, and what was done.

    ``within``: only below these keys.
    """
    document = copy.deepcopy(document)
    literal = None
    notes = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not document:
            break
        if within:
            key = rng.choice([key for key in within if key in document] or list(document))
            inside = places(document[key])
            place = (key, *rng.choice(inside))
        else:
            place = choose_place(rng, document)
        kind = rng.choice(
            [
                "number",
                "text",
                "literal",
                "remove",
                "wrap",
                "repeat",
                "rename",
                "nudge",
                "copy",
                "many",
            ]
        )
        notes.append(f"{kind} {'.'.join(map(str, place))[:60]}")
        parent = get(document, place[:-1])
        last = place[-1]
        value = parent[last]
        if kind == "number":
            parent[last] = rng.choice(NUMBERS)
        elif kind == "text":
            parent[last] = rng.choice(TEXTS)
        elif kind == "literal":
            literal = rng.choice(LITERALS)
            parent[last] = RAW
        elif kind == "remove":
            del parent[last]
        elif kind == "wrap":
            parent[last] = rng.choice([[value], {"a": value}, str(value), [[value]], {}, []])
        elif kind == "nudge" and type(value) is int:
            parent[last] = value + rng.choice([-1, 1, 1000])
        elif kind == "nudge" and isinstance(value, str):
            parent[last] = rng.choice(
                [value + rng.choice(TEXTS[:8]), value[:-1], value.upper(), value + value]
            )
        elif kind in ("repeat", "nudge") and isinstance(parent, list):
            parent.insert(rng.randint(0, len(parent)), copy.deepcopy(value))
        elif kind in ("rename", "repeat", "nudge") and isinstance(parent, dict):
            parent[rng.choice(TEXTS)] = parent.pop(last) if kind == "rename" else value
        elif kind == "copy":
            parent[last] = copy.deepcopy(get(document, choose_place(rng, document)))
        elif kind == "many":
            count = rng.choice([10, 300, 5000])
            if isinstance(value, dict):
                value.update(
                    {f"k{i}": copy.deepcopy(next(iter(value.values()), 1)) for i in range(count)}
                )
            else:
                parent[last] = [value] * count
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    if literal is not None:
        text = text.replace(f'"{RAW}"', literal)
    return text.encode("utf-8", "surrogatepass"), ", ".join(notes)
