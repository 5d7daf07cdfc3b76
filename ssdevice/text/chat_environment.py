"""The sandbox of chat templates, and the process that renders them: a program of its own, see
``renderer``.

Templates are programs that come with a model, so they run in jinja2's immutable sandbox with the
names that Hugging Face templates may use. Requests and answers are lines of JSON. The system limits
the process, so no expression of a template gets around it.
"""

import datetime
import json
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 1 << 23
"""Of a prompt."""
MAX_REASON = 300


class Generation(Extension):
    """``{% generation %}`` marks assistant text for training masks; here it delimits a scope."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


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
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def environment() -> Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    del made.globals["lipsum"]  # no part of what templates may use
    made.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=PublicNamespace
    )
    return made


@lru_cache(maxsize=4)
def _compiled(source: str) -> Template:
    return environment().from_string(source)


def _read(source: str) -> dict[str, Any]:
    """``constants``: texts in expressions; ``names``: what the template is given; ``members``: what
    it reads; ``doubts``: see ``template_looks``.
    """
    from ssdevice.text.template_looks import doubts

    made = environment()
    tree = made.parse(source)
    found = dict.fromkeys(
        node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
    )
    members = {node.attr for node in tree.find_all(nodes.Getattr)}
    names = meta.find_undeclared_variables(tree) - made.globals.keys()
    return {
        "constants": list(found),
        "names": sorted(names),
        "members": sorted(members),
        "doubts": list(doubts(tree)),
    }


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    """``invalid``: the reason; or the result of ``_read``; or ``texts``: by conversation a text, or
    why it is refused.

    ``last``: whether this process should stop. After a MemoryError Python 3.11 was seen in
    disorder.
    """
    source = request["template"]
    try:
        template = _compiled(source)
        if request["conversations"] is None:
            return {**_read(source), "last": False}
    except Exception as error:  # jinja2 and Python's compiler raise many, also for deep nesting
        return {"invalid": _invalid(error), "last": True}
    texts = [_rendered(template, request["names"], *given) for given in request["conversations"]]
    return {"texts": [text[:2] for text in texts], "last": any(last for *_, last in texts)}


def _invalid(error: Exception) -> str:
    """Why a template cannot be compiled, which computes what is constant in it."""
    if isinstance(error, MemoryError):
        return _reason(error)
    if isinstance(error, TemplateSyntaxError):
        return f"it is not valid jinja2: {_reason(error)} (line {error.lineno})"
    return f"it is not valid jinja2: {_reason(error)}"


def _rendered(
    template: Template, names: dict[str, Any], messages: Any, opened: bool
) -> tuple[str | None, str | None, bool]:
    """The text, the reason where there is none, and whether the process should answer no more."""
    fixed = {"messages": messages, "add_generation_prompt": opened}
    try:
        text = template.render({"tools": None, "documents": None, **names, **fixed})
    except Exception as error:  # anything that a template's own expressions can raise
        return None, _reason(error), not isinstance(error, TemplateError)
    if len(text) > MAX_CHARS:
        return (
            None,
            f"it makes a prompt of {len(text)} characters, at most {MAX_CHARS} are allowed",
            False,
        )
    return text, None, False


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it takes more memory than it is allowed"
    return " ".join((str(error) or type(error).__name__).split())[:MAX_REASON]


def main() -> None:
    """Answer requests until there are no more.

    Arguments: seconds of processor time for each, bytes of memory.
    """
    import signal

    seconds = float(sys.argv[1])
    memory = int(sys.argv[2])
    # This program lies in the package that it imports from; the folder comes last, so that nothing
    # in it can stand for a module of another package.
    sys.path.append(str(Path(__file__).parents[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    _limit(memory)
    timed = hasattr(signal, "setitimer")
    for line in sys.stdin.buffer:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # ends this process, whatever it does
        answer = json.dumps(_answered(json.loads(line))).encode()
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _limit(memory: int) -> None:
    """Where a system has no such limits, the parent still ends what takes too long."""
    try:
        import resource
    except ImportError:
        return
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    for limit, most in limits.items():
        with suppress(OSError, ValueError):
            resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    main()
