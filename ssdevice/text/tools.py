"""Calls of functions that a model writes: the schema of a Python function, and calls in an answer's
text.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Self

from ssdevice import arguments
from ssdevice.errors import InputError
from ssdevice.text.calls import Call, Marks, read_gemma_call, read_json_call
from ssdevice.text.thoughts import after_thoughts
from ssdevice.text.tokenizer import ChatTokenizer

PYTHON_TAG = "<|python_tag|>"


class ToolStyle(Enum):
    """How a family's chat template writes calls.

    HERMES, also Qwen: ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``. LLAMA3: the whole
    answer is ``{"name": .., "parameters": {..}}``, several separated by ``;``, perhaps after
    ``<|python_tag|>``. GEMMA: ``call:NAME{key:value}`` between its own tokens, with others around
    strings.
    """

    HERMES = (Marks("<tool_call>", "</tool_call>"),)
    LLAMA3 = (Marks(PYTHON_TAG, ";"),)
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


NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
CLOSED_KEYS = {
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "properties",
    "readOnly",
    "required",
    "strict",
    "title",
    "type",
    "writeOnly",
}
"""The keys of a schema beside which ``additionalProperties`` may be false: the others may ask for a
property that is not listed.
"""
_FENCED = re.compile(r"\s*```\w*\s*(.*?)\s*```\s*", re.DOTALL)
"""A block of code, as Markdown writes it."""


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
        kind = tool.get("type", "function")
        if kind != "function":
            raise InputError(f"{where}: type {repr(kind)[:60]}, expected 'function'")
        function = arguments.mapping(f"{where}.function", tool.get("function"))
        name = arguments.text(f"{where}.function.name", function.get("name"))
        if not name:
            raise InputError(f"{where}.function.name is empty")
        parameters = function.get("parameters")
        if parameters is None:
            parameters = NO_PARAMETERS
        found[name] = arguments.mapping(f"{where}.function.parameters", parameters)
    return found


def arguments_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a call's arguments: an object that fits the ``parameters`` of the function
    ``name``.

    Properties that are listed are all there are, where that cannot exclude a value that fits: small
    models invent more. Raises InputError for parameters that are no object.
    """
    kinds = parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise InputError(
            f"function {name[:60]!r}: its parameters are of type {repr(kinds)[:60]}, expected "
            "'object': arguments have names"
        )
    schema = {**parameters, "type": "object"}
    properties = parameters.get("properties")
    if (
        isinstance(properties, Mapping)
        and parameters.keys() <= CLOSED_KEYS
        and set(parameters.get("required") or ()) <= properties.keys()
    ):
        schema["additionalProperties"] = False
    return schema


def parse_calls(text: str, style: ToolStyle, thinking: bool = False) -> tuple[str, list[Call]]:
    """``text -> (content, calls)``.

    Calls have the marks of the style, or are the whole answer, as it is or as a block of code.
    What only looks like a call, such as broken JSON, stays in the content, and so does all up to
    the last ``</think>``. ``thinking``: whether the prompt ended with ``<think>``.
    """
    begin, thinking = after_thoughts(text, style.value, thinking)
    if thinking:
        return text.strip(), []
    answer = text[begin:]
    if style is ToolStyle.LLAMA3:
        content, calls = _parse_llama(answer)
    else:
        content, calls = _parse_marked(answer, style)
        if not calls:
            content, calls = _parse_bare(answer)
    return (text[:begin] + content).strip(), calls


def _parse_marked(text: str, style: ToolStyle) -> tuple[str, list[Call]]:
    content = ""
    calls = list[Call]()
    at = 0
    while True:
        found = [(text.find(marks.opening, at), marks) for marks in style.value]
        found = [(start, marks) for start, marks in found if start >= 0]
        if not found:
            return content + text[at:], calls
        start, marks = min(found)
        begin = start + len(marks.opening)
        if style is ToolStyle.GEMMA:
            call, end = read_gemma_call(text, begin, marks)
        else:
            call, end = _marked_json_call(text, begin, marks)
        if call is None:
            content += text[at:begin]
            at = begin
        else:
            content += text[at:start]
            calls.append(call)
            at = end


def _marked_json_call(text: str, at: int, marks: Marks) -> tuple[Call | None, int]:
    """The call that begins there, and where the text after it begins.

    The stop token may have come before the closing mark, and strings may have marks in them.
    """
    call, end = read_json_call(text, at)
    if call is None or not (text.startswith(marks.closing, end) or end == len(text)):
        return None, at
    return call, min(len(text), end + len(marks.closing))


def _parse_llama(text: str) -> tuple[str, list[Call]]:
    content, _, rest = text.rpartition(PYTHON_TAG)
    fenced = _FENCED.fullmatch(rest)
    rest = fenced[1] if fenced else rest.strip()
    calls = list[Call]()
    at = 0
    while at < len(rest):
        call, at = _marked_json_call(rest, at, ToolStyle.LLAMA3.value[0])
        if call is None:
            return text, []
        calls.append(call)
    return content, calls


def _parse_bare(text: str) -> tuple[str, list[Call]]:
    """The calls that the whole text is, one after another."""
    fenced = _FENCED.fullmatch(text)
    inside = fenced[1] if fenced else text
    calls = list[Call]()
    at = 0
    while at < len(inside):
        call, at = read_json_call(inside, at, bare=True)
        if call is None:
            return text, []
        calls.append(call)
    return "", calls


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
        f"{where}: {hint} is no type that JSON has; "
        f"use {', '.join(each.__name__ for each in _TYPES)}"
    )
