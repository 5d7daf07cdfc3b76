"""Random functions, whose parameters are described as clients describe them, well and badly."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("city", "days", "unit", "at", "note")
TEXTS = ("Rome", 'say "hi"', "a\\b", "</tool_call>", "</think>", "")
PLAIN = ("string", "integer", "number", "boolean", "null")


def random_tool(random: Random, name: str) -> dict[str, Any]:
    """A function in OpenAI's form."""
    function: dict[str, Any] = {"name": name}
    kind = random.random()
    if kind < 0.08:
        function["parameters"] = random.choice([None, {}, {"description": "none"}])
    elif kind > 0.12:
        function["parameters"] = random_parameters(random)
    return {"type": "function", "function": function}


def random_parameters(random: Random) -> dict[str, Any]:
    """A schema of arguments, with the object itself said in one of several ways."""
    found = random_object(random, 0)
    form = random.random()
    if form < 0.2:
        del found["type"]
    elif form < 0.3:
        found["type"] = ["object", "null"]
    elif form < 0.45:
        return {"$ref": "#/$defs/given", "$defs": {"given": found}}
    elif form < 0.6:
        found["anyOf"] = [random_object(random, 1), random.choice([{"type": "array"}, {}])]
    elif form < 0.75:
        # Another property is asked for than those that are listed above.
        found["allOf"] = [{"properties": {"more": random_value(random, 1)}, "required": ["more"]}]
    elif form < 0.8:
        found["required"] = [*found["required"], "not listed"]
    return found


def random_object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randrange(4))
    found = {
        "type": "object",
        "properties": {name: random_value(random, depth + 1) for name in names},
        "required": [name for name in names if random.random() < 0.6],
    }
    if random.random() < 0.3:
        found["additionalProperties"] = random.choice([False, True, {"type": "integer"}])
    return found


def random_value(random: Random, depth: int) -> dict[str, Any]:
    """The schema of a value."""
    kinds = ["plain", "plain", "enum", "text", "whole", "number"]
    if depth < 3:
        kinds += ["array", "object", "any of", "anything"]
    kind = random.choice(kinds)
    if kind == "plain":
        return {"type": random.choice([*PLAIN, random.sample(PLAIN, 2)])}
    if kind == "enum":
        return {"enum": random.sample([*TEXTS, 1, -2.5, True, None], 3)}
    if kind == "text":
        return {"type": "string", **random.choice([{"maxLength": 5}, {"pattern": "^[a-c]{2,4}$"}])}
    if kind == "whole":
        return {"type": "integer", "minimum": random.randrange(-50, 50), "maximum": 100}
    if kind == "number":
        return {"type": "number", "minimum": random.randrange(-5, 5), "exclusiveMaximum": 9.5}
    if kind == "array":
        return {"type": "array", "items": random_value(random, depth + 1), "maxItems": 3}
    if kind == "object":
        return random_object(random, depth)
    if kind == "any of":
        return {"anyOf": [random_value(random, depth + 1) for _ in range(2)]}
    return {}
