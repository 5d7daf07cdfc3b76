"""Bounds on what a chat template may cost: it is a program that came with a model, and it runs for every prompt.

The sandbox keeps templates from reaching out. This keeps them from looping and growing without end: a rendering has a
budget of loop turns and macro calls, and operators, filters and methods that make much of little (``'x' * 10**9``,
``center``, ``replace``, ``join``, ``format``) are refused before they do so. What is left can still be slow; a template
of someone not trusted is what signatures are for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes

MAX_TURNS = 200_000
MAX_CHARS = 1 << 23
"""Of a text, and entries of a list, that a template makes; and of the prompt that comes of it."""
MAX_ARGUMENT = 10_000
MAX_EXPONENT = 64
MAX_BITS = 4096
# Widths of five digits, and widths or precisions that are arguments.
_WIDE = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*")
_turns: ContextVar[list[int]] = ContextVar("turns")


class BoundError(ValueError):
    """A template that asks for more than any prompt needs."""


@contextmanager
def budget() -> Iterator[None]:
    """Within this context templates have MAX_TURNS turns together."""
    token = _turns.set([MAX_TURNS])
    try:
        yield
    finally:
        _turns.reset(token)


def turn() -> str:
    """Count one turn of a loop or call of a macro; raises BoundError when there were too many."""
    left = _turns.get()
    left[0] -= 1
    if left[0] < 0:
        raise BoundError(f"it takes more than {MAX_TURNS} turns of loops")
    return ""


def joined(*parts: Any) -> str:
    """What ``~`` makes of its operands."""
    texts = [str(part) for part in parts]
    check_size(sum(map(len, texts)))
    return "".join(texts)


def check_size(size: int) -> None:
    """Raise BoundError for a text or list of this size."""
    if size > MAX_CHARS:
        raise BoundError(f"it makes a text or list of {size} entries, at most {MAX_CHARS} are allowed")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise BoundError for an operation that makes much of little."""
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Sized) and isinstance(other, int):
                check_size(len(one) * max(other, 0))
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
            raise BoundError("it multiplies numbers without end")
    elif operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= MAX_EXPONENT):
        raise BoundError(f"it raises to more than the power of {MAX_EXPONENT}")
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        check_size(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        check_format(left)


def check_format(form: str) -> None:
    """Raise BoundError for a format with a width that is huge or an argument."""
    if _WIDE.search(form):
        raise BoundError(f"it formats with {form[:40]!r}")


def check_call(name: str, subject: Any, arguments: tuple[Any, ...]) -> None:
    """Raise BoundError for a filter or method ``name`` of ``subject`` that makes much of little."""
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_ARGUMENT:
            raise BoundError(f"it calls {name} with {str(argument)[:30]}, at most {MAX_ARGUMENT} is allowed")
    texts = [argument for argument in arguments if isinstance(argument, str)]
    if name == "replace" and isinstance(subject, str) and len(texts) >= 2:
        check_size(len(subject) + (subject.count(texts[0]) if texts[0] else len(subject) + 1) * len(texts[1]))
    elif name == "join":
        # The filter joins its subject by its argument, the method the other way round.
        separator, parts = (subject, arguments[0]) if isinstance(subject, str) and arguments else (texts[:1], subject)
        if isinstance(parts, Sized):
            check_size(len(parts) * max(len(str(separator)), 1))
    elif name in ("format", "format_map") and isinstance(subject, str):
        check_format(subject)
    elif name in ("expandtabs", "indent", "wordwrap", "slice", "batch") and isinstance(subject, Sized):
        width = max([4, *(abs(argument) for argument in arguments if isinstance(argument, int))])
        check_size((len(subject) + 1) * width)


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its arguments and the size of its result checked."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # with jinja2's mark, if it takes the context or the environment first
    def checked(*arguments: Any, **named: Any) -> Any:
        given = arguments[skip:]
        check_call(name, given[0] if given else None, (*given[1:], *named.values()))
        result = function(*arguments, **named)
        if isinstance(result, (str, list, tuple)):
            check_size(len(result))
        return result

    return checked


def count_turns(template: nodes.Template) -> None:
    """Have every loop and macro of a parsed template count its turns, and ``~`` check what it makes."""
    from jinja2 import nodes

    def call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        function = nodes.ImportedName(f"{__name__}.{name}", lineno=line)  # no name that a template could hide
        return nodes.Call(function, arguments, [], None, None, lineno=line)

    for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
        node.body.insert(0, nodes.Output([call("turn", [], node.lineno)], lineno=node.lineno))
    _replace_joins(template, call)


def _replace_joins(node: nodes.Node, call: Callable[[str, list[Any], int], Any]) -> None:
    from jinja2 import nodes

    for field, value in list(node.iter_fields()):
        items = value if isinstance(value, list) else [value]
        for at, item in enumerate(items):
            if not isinstance(item, nodes.Node):
                continue
            _replace_joins(item, call)
            if isinstance(item, nodes.Concat):
                new = call("joined", item.nodes, item.lineno)
                if isinstance(value, list):
                    value[at] = new
                else:
                    setattr(node, field, new)
