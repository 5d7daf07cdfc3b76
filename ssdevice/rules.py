"""Bounds of values as data: a subset of JSON Schema, which the checks here and the published schema
share.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from ssdevice.errors import ConfigError

Rule = Mapping[str, Any]
"""A subset of JSON Schema: minimum, maximum, exclusiveMinimum, maxLength, pattern (with a
description of it), minItems, maxItems, items, maxProperties, propertyNames, additionalProperties.
"""


def check_rule(where: str, value: Any, rule: Rule) -> None:
    """Raise ConfigError if a value of the right type breaks a rule; numbers that have one are no
    NaN.

    None passes.
    """
    if type(value) in (int, float) and rule:
        _check_number(where, value, rule)
    elif isinstance(value, str):
        _check_text(where, value, rule)
    elif isinstance(value, tuple):
        _check_items(where, value, rule)
    elif isinstance(value, dict):
        _check_entries(where, value, rule)


def _check_number(where: str, value: float, rule: Rule) -> None:
    low = rule.get("minimum", -inf)
    high = rule.get("maximum", inf)
    above = rule.get("exclusiveMinimum", -inf)
    if low <= value <= high and value > above:
        return
    shown = str(value)[:30]
    if high == inf:
        raise ConfigError(f"{where} is {shown}, expected {low} or more")
    if above > -inf:
        raise ConfigError(f"{where} is {shown}, expected above {above}, at most {high}")
    raise ConfigError(f"{where} is {shown}, expected {low} to {high}")


def _check_text(where: str, value: str, rule: Rule) -> None:
    if len(value) > rule.get("maxLength", len(value)):
        raise ConfigError(
            f"{where} has {len(value)} characters, at most {rule['maxLength']} are allowed"
        )
    if "pattern" in rule and not re.fullmatch(rule["pattern"], value):
        raise ConfigError(f"{where} is {value[:100]!r}, expected {rule['description']}")


def _check_items(where: str, value: tuple[Any, ...], rule: Rule) -> None:
    low = rule.get("minItems", 0)
    high = rule.get("maxItems", len(value))
    if not low <= len(value) <= high:
        raise ConfigError(f"{where} has {len(value)} entries, expected {low} to {high}")
    for i, item in enumerate(value):
        check_rule(f"{where}[{i}]", item, rule.get("items", {}))


def _check_entries(where: str, value: dict[Any, Any], rule: Rule) -> None:
    if len(value) > rule.get("maxProperties", len(value)):
        raise ConfigError(
            f"{where} has {len(value)} entries, at most {rule['maxProperties']} are allowed"
        )
    for key, item in value.items():
        check_rule(f"{where}: a name", key, rule.get("propertyNames", {}))
        check_rule(f"{where}[{key!r}]", item, rule.get("additionalProperties", {}))


def within(low: float, high: float) -> Rule:
    return {"minimum": low, "maximum": high}


POSITIVE: Rule = {"minimum": 1}
ABOVE_0: Rule = {"exclusiveMinimum": 0, "maximum": 1e30}


@dataclasses.dataclass(frozen=True)
class Ruled:
    """A dataclass whose fields carry a Rule as metadata.

    Raises ConfigError, which names the field that breaks it.
    """

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            check_rule(item.name, getattr(self, item.name), item.metadata)


def repeated_name(names: Iterable[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)
