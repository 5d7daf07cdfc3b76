"""Calls of functions that a model writes: the schema of a Python function, and calls in an answer's
text.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Self

from ssdevice import arguments
from ssdevice.errors import InputError
from ssdevice.text.tokenizer import ChatTokenizer


class Marks(NamedTuple):
    """What is before and after a call, and around its strings."""

    opening: str
    closing: str
    quote: str = '"'


PYTHON_TAG = "<|python_tag|>"


class ToolStyle(Enum):
    """How a family's chat template writes calls.

    HERMES, also Qwen: ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``. LLAMA3: the whole
    answer is ``{"name": .., "parameters": {..}}``, several separated by ``;``, perhaps after
    ``<|python_tag|>``. GEMMA: ``call:NAME{key:value}`` between its own tokens, with others around
    strings.
    """

    HERMES = (Marks("<tool_call>", "</tool_call>"),)
    LLAMA3 = (Marks(PYTHON_TAG, ";"), Marks("{", ";"))
    GEMMA = (
        Marks("<start_function_call>", "<end_function_call>", "<escape>"),
        Marks("<|tool_call>", "<tool_call|>", '<|"|>'),
    )

    @property
    def openings(self) -> list[str]:
        return [marks.opening for marks in self.value]

    @classmethod
    def of(cls, template: str | None) -> "ToolStyle | None":
        """The style of a chat template; None where it writes no calls, or in a way that is not read
        here.
        """

        def has(*texts: str) -> bool:
            return any(text in (template or "") for text in texts)

        if has(*cls.GEMMA.openings):
            return cls.GEMMA
        if has(*cls.HERMES.openings):
            return None if has("<function=", "<arg_key>") else cls.HERMES
        return cls.LLAMA3 if has(PYTHON_TAG, "ipython") else None

    @classmethod
    def forced(cls, template: str | None) -> Self:
        """The style of a call that must be written: the template's own, otherwise plain JSON."""
        style = cls.of(template)
        return cls.LLAMA3 if style in (None, cls.GEMMA) else style


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_BARE_KEY = re.compile(r"([{,]\s*)([\w.\-]+)\s*:")
_GEMMA_CALL = re.compile(r"\s*call:\s*([\w.\-]+)\s*(\{.*\})\s*", re.DOTALL)


def answer_text(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """The text of an answer's ids with special tokens written out, as ``parse_calls`` needs it,
    without stop tokens.
    """
    kept = [i for i in ids if i not in tokenizer.stop_ids]
    return str(tokenizer.tokenizer.decode(kept, skip_special_tokens=False))


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Names of functions in OpenAI's form (``tool_of``), and schemas of their parameters; raises
    InputError.
    """
    found = {}
    for number, tool in enumerate(arguments.objects("tools", tools)):
        where = f"tools[{number}]"
        if (kind := tool.get("type", "function")) != "function":
            raise InputError(f"{where}: type {repr(kind)[:60]}, expected 'function'")
        function = arguments.mapping(f"{where}.function", tool.get("function"))
        if not (name := arguments.text(f"{where}.function.name", function.get("name"))):
            raise InputError(f"{where}.function.name is empty")
        found[name] = arguments.mapping(
            f"{where}.function.parameters", function.get("parameters", NO_PARAMETERS)
        )
    return found


def parse_calls(text: str, style: ToolStyle) -> tuple[str, list[Call]]:
    """``text -> (content, calls)``.

    What only looks like a call, such as broken JSON, stays in the content.
    """
    if style is ToolStyle.LLAMA3:
        return _parse_llama(text)
    read = _gemma_call if style is ToolStyle.GEMMA else _json_call
    content = ""
    calls = []
    at = 0
    while found := min(
        ((i, m) for m in style.value if (i := text.find(m.opening, at)) >= 0), default=None
    ):
        start, marks = found
        begin = start + len(marks.opening)
        call, end = read(text, begin, marks)
        content += text[at : begin if call is None else start]
        calls += [] if call is None else [call]
        at = begin if call is None else end
    return (content + text[at:]).strip(), calls


def _parse_llama(text: str) -> tuple[str, list[Call]]:
    content, _, rest = text.rpartition(PYTHON_TAG)
    rest, calls, at = rest.strip(), [], 0
    while at < len(rest):
        call, at = _json_call(rest, at, ToolStyle.LLAMA3.value[0])
        if call is None:
            return text.strip(), []
        calls.append(call)
    return content.strip(), calls


def _json_call(text: str, at: int, marks: Marks) -> tuple[Call | None, int]:
    """The call that begins there, and where the text after it begins; the JSON may have marks in
    its strings.
    """
    try:
        value, at = _JSON.raw_decode(text, len(text) - len(text[at:].lstrip()))
    except (ValueError, RecursionError):
        return None, at
    at = len(text) - len(text[at:].lstrip())
    if not text.startswith(marks.closing, at) and at < len(text):
        return None, at
    return _call(value), min(len(text), at + len(marks.closing))


def _gemma_call(text: str, at: int, marks: Marks) -> tuple[Call | None, int]:
    inside, closing, _ = text[at:].partition(marks.closing)
    if (body := _GEMMA_CALL.fullmatch(inside)) is None:
        return None, at
    # Every other piece is a string, the rest is JSON but for its keys.
    pieces = body[2].split(marks.quote)
    pieces[::2] = [_BARE_KEY.sub(r'\1"\2":', piece) for piece in pieces[::2]]
    pieces[1::2] = map(json.dumps, pieces[1::2])
    given = _decoded("".join(pieces))
    return None if given is None else Call(body[1], given), at + len(inside + closing)


def _call(value: Any) -> Call | None:
    """The call in a JSON value: the families say ``arguments`` or ``parameters``."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters"))
    given = _decoded(given) if isinstance(given, str) else given
    return Call(value["name"], given) if isinstance(given, dict) else None


def _decoded(text: str) -> Any:
    """The value of a JSON text; None for another text."""
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)
_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_TYPES[type(None)] = "null"
_ARGUMENTS = re.compile(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^[ \t]+(\w+)(?: \(.*?\))?:[ \t]*(\S.*)$", re.MULTILINE)


def tool_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function, in the form that chat templates and OpenAI's ``tools`` take.

    Its description is the first paragraph of its docstring, those of parameters are lines ``name:
    text`` under ``Args:``. Raises InputError for a parameter without a type that JSON has.
    """
    name = getattr(function, "__name__", "function")
    about = inspect.getdoc(function) or ""
    block = _ARGUMENTS.search(about)
    told = dict(_ARGUMENT.findall(block[1])) if block else {}
    properties: dict[str, Any] = {}
    try:
        takes = inspect.signature(function, eval_str=True).parameters.values()
    except (NameError, TypeError) as error:
        raise InputError(f"{name}: {error}") from error
    for each in takes:
        where = f"{name}, parameter {each.name}"
        if (
            each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
            or each.annotation is each.empty
        ):
            raise InputError(f"{where}: expected a named parameter with a type")
        properties[each.name] = _schema(each.annotation, where)
        if each.name in told:
            properties[each.name]["description"] = told[each.name].strip()
    required = [each.name for each in takes if each.default is each.empty]
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    described = {
        "name": name,
        "description": " ".join(about.partition("\n\n")[0].split()),
        "parameters": parameters,
    }
    return {"type": "function", "function": described}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, where) for each in inner]}
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1], where)}
    raise InputError(
        f"{where}: {hint} is no type that JSON has; use {', '.join(each.__name__ for each in _TYPES)}"
    )
