"""What commands print: one JSON object, or the same as tables."""

import json
import sys
from typing import Any

SIZES = ("bytes", "files", "weights", "kv_cache", "kv_cache_per_token", "state", "estimate")
"""What is a number of bytes."""
FILE_WIDTH = 160
"""Characters of a line where no terminal tells."""


def show(found: dict[str, Any], as_json: bool) -> None:
    """Print what a command found, as one JSON object or as tables of the same values by the same
    names.

    Lists and mappings of objects become tables below the other values; what contains such comes
    last.
    """
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    values = Table(show_header=False, box=box.SIMPLE, pad_edge=False)
    tables = []
    nested = {}
    values.add_column()
    values.add_column(overflow="fold")
    for name, value in found.items():
        rows = value if isinstance(value, list) else []
        if isinstance(value, dict) and all(isinstance(each, dict) for each in value.values()):
            rows = [{name: key} | each for key, each in value.items()]
        if rows and isinstance(rows[0], dict):
            tables.append(
                Table(*rows[0], title=name, title_justify="left", box=box.SIMPLE, pad_edge=False)
            )
            for row in rows:
                tables[-1].add_row(*(escape(_text(*cell)) for cell in row.items()))
        elif isinstance(value, dict) and any(
            isinstance(each, (dict, list)) for each in value.values()
        ):
            nested[name] = value
        elif value not in (None, "", [], {}):
            values.add_row(name, escape(_text(name, value, "\n")))
    console.print(values, *tables)
    for name, value in nested.items():
        console.print(f"{name}:")
        show(value, as_json)


def _text(name: str, value: Any, between: str = ", ") -> str:
    """A value for readers; what SIZES names has a unit (MB is 10⁶ bytes)."""
    if isinstance(value, dict):
        return between.join(
            f"{key} {_text(name if name in SIZES else key, each)}" for key, each in value.items()
        )
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return between.join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if name in SIZES and value >= factor:
            return f"{value / factor:.1f} {unit}"
    return "" if value is None else str(value)
