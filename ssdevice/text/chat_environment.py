"""The sandbox of chat templates, imported with the first of them.

Templates are programs that come with a model, so they run in jinja2's immutable sandbox with the names that Hugging
Face templates may use: ``messages``, ``add_generation_prompt``, ``tools`` and ``documents`` (always None here), the
special tokens, ``raise_exception``, ``strftime_now``, the ``tojson`` filter, loop controls and ``generation`` blocks.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ssdevice.text import chat_bounds


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what it makes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        chat_bounds.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if function is not range:  # the sandbox has a bound of its own for it
            method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
            name, subject = getattr(method, "__name__", ""), getattr(method, "__self__", None)
            chat_bounds.check_call(name, subject, (*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        chat_bounds.count_turns(source)
        return super()._generate(source, *args, **kwargs)


class Generation(Extension):
    """``{% generation %}`` marks assistant text for training masks; here it only delimits a scope."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PublicNamespace(Namespace):
    """A namespace that takes no underscore names, which would reach into Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def environment() -> Environment:
    """An environment for one template."""
    made = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.filters = {name: chat_bounds.bounded(name, used) for name, used in made.filters.items()}
    del made.globals["lipsum"]  # no part of what templates may use
    made.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=PublicNamespace)
    return made
