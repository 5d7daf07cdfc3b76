"""Requests in OpenAI's form, checked: what a session is asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ssdevice import arguments, strict_json
from ssdevice.errors import InputError
from ssdevice.runtime.structure.options import Structure
from ssdevice.serve.refusal import Refusal

MAX_DEPTH = 128
"""Levels of lists and objects in a request."""
MAX_STOPS = 16
DRAWN_SEEDS = 1 << 31
"""Seeds of requests without one; JavaScript and int32 hold all of them."""
COMPLETION_TOKENS = 16
"""OpenAI's default for completions; answers of a chat end by themselves, or with the context."""
SAMPLED = ("top_p", "top_k", "min_p", "typical_p", "seed")
"""Parameters that ask for sampling, unless the temperature is 0."""
CHOICE = ("temperature", *SAMPLED, "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Parameters that are fields of Sampling; it checks them."""
COMMON = ("model", "stream", "stream_options", "max_tokens", "stop", "logprobs", "logit_bias", "user", *CHOICE)
CHAT = (
    *COMMON, "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice",
    "chat_template_kwargs",
)  # fmt: skip
TEXT = (*COMMON, "prompt")
NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "echo": False, "suffix": "", "store": False, "parallel_tool_calls": True,
    "service_tier": "auto",
}  # fmt: skip
"""Parameters that only have this value here, which asks for nothing; clients send it unasked."""


@dataclass(frozen=True)
class Request:
    """What to decode: either ``messages`` with ``tools`` and ``template`` arguments, or a ``prompt``, text or ids.

    ``sampling``: the fields of Sampling that were named, ``structure`` among them, and a seed if tokens are drawn.
    ``forced``: functions of which the answer must call one. ``max_tokens``: None for as many as the context takes.
    ``logprobs``: None for none, else how many alternatives. ``usage``: whether a stream ends with it.
    """

    app: str
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    forced: tuple[Mapping[str, Any], ...] = ()
    template: Mapping[str, Any] | None = None
    prompt: str | Sequence[int] = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    stream: bool = False
    usage: bool = False

    @property
    def samples(self) -> bool:
        """Whether tokens are to be drawn."""
        return _samples(self.sampling)


class _Body:
    """The parameters of a request that have a value."""

    def __init__(self, content: bytes, known: Sequence[str]) -> None:
        given = strict_json.parse(content, "the request", InputError, MAX_DEPTH)
        if not isinstance(given, dict):
            raise Refusal(f"the request is {type(given).__name__}, expected a JSON object")
        self.given = {name: value for name, value in given.items() if value is not None}
        for name, value in self.given.items():
            if name in NEUTRAL:
                if json.dumps(value) != json.dumps(NEUTRAL[name]):
                    only = f"{name} can only be {json.dumps(NEUTRAL[name])} here"
                    raise Refusal(only, param=name, code="unsupported_value")
            elif name not in known:
                raise Refusal(strict_json.unknown_key(name, known), param=name[:60], code="unknown_parameter")

    def get(self, name: str, check: Callable[[str, Any], Any], default: Any) -> Any:
        """The value of a parameter, checked by ``check(name, value)``."""
        if name not in self.given:
            return default
        with _at(name):
            return check(name, self.given[name])

    def needed(self, name: str) -> Any:
        """The value of a parameter that every request has."""
        if name not in self.given:
            raise Refusal(f"{name} is missing", param=name, code="missing_required_parameter")
        return self.given[name]


def chat_request(content: bytes) -> Request:
    """The request of ``/v1/chat/completions``. Raises Refusal, InputError."""
    body = _Body(content, CHAT)
    if "max_tokens" in body.given and "max_completion_tokens" in body.given:
        raise Refusal("max_tokens and max_completion_tokens are one setting: give one of them", param="max_tokens")
    most = body.get("max_completion_tokens", _positive, body.get("max_tokens", _positive, None))
    wanted = body.get("logprobs", arguments.flag, False)
    alternatives = body.get("top_logprobs", _within(20), 0)
    if alternatives and not wanted:
        raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
    tools, forced = _tools(body)
    structure = body.get("response_format", _structure, None)
    if structure is not None and tools:
        raise Refusal("response_format cannot go with tools; tool_choice: none leaves them out", param="tools")
    return Request(
        messages=body.needed("messages"),
        tools=tools,
        forced=forced,
        template=body.get("chat_template_kwargs", arguments.mapping, None),
        **_common(body, most, alternatives if wanted else None, structure),
    )


def text_request(content: bytes) -> Request:
    """The request of ``/v1/completions``. Raises Refusal, InputError."""
    body = _Body(content, TEXT)
    most = body.get("max_tokens", _positive, COMPLETION_TOKENS)
    prompt = body.needed("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    with _at("prompt"):
        prompt = prompt if isinstance(prompt, str) else arguments.wholes("prompt, where it is not one text,", prompt)
    return Request(prompt=prompt, **_common(body, most, body.get("logprobs", _within(5), None), None))


def _common(body: _Body, most: int | None, logprobs: int | None, structure: Structure | None) -> dict[str, Any]:
    sampling = {name: value for name, value in body.given.items() if name in CHOICE}
    if _samples(sampling):
        sampling.setdefault("seed", random.randrange(DRAWN_SEEDS))
    if bias := body.get("logit_bias", _bias, {}):
        sampling["logit_bias"] = bias
    if structure is not None:
        sampling["structure"] = structure
    body.get("user", arguments.text, "")
    stream = body.get("stream", arguments.flag, False)
    options = body.get("stream_options", arguments.mapping, None)
    if options is not None and (not stream or options.keys() - {"include_usage"}):
        raise Refusal("stream_options goes with stream: true, and has include_usage only", param="stream_options")
    return {
        "app": body.get("model", arguments.text, "") or body.needed("model"),
        "max_tokens": most,
        "stop": body.get("stop", _stops, ()),
        "sampling": sampling,
        "logprobs": logprobs,
        "stream": stream,
        "usage": arguments.flag("include_usage", (options or {}).get("include_usage", False)),
    }


def _samples(named: Mapping[str, Any]) -> bool:
    return bool(named["temperature"]) if "temperature" in named else any(name in named for name in SAMPLED)


def _tools(body: _Body) -> tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...]]:
    """The tools that the model is told of, and the functions of which it must call one."""
    tools: tuple[Mapping[str, Any], ...] = body.get("tools", _functions, ())
    choice: Any = body.given.get("tool_choice", "auto")
    if choice != "auto" and choice != "none" and not tools:
        raise Refusal("tool_choice needs tools", param="tool_choice")
    functions = [tool["function"]["name"] for tool in tools]
    if choice in ("auto", "none"):
        return tools if choice == "auto" else (), ()
    if choice == "required":
        return tools, tools
    with _at("tool_choice"):
        name = arguments.mapping("tool_choice.function", arguments.mapping("tool_choice", choice).get("function")).get(
            "name"
        )
        if choice.get("type") != "function" or name not in functions:
            raise InputError(f"tool_choice names none of the functions {', '.join(functions)}")
        return tools, tuple(tool for tool in tools if tool["function"]["name"] == name)


def _functions(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise InputError(f"{name} is {type(value).__name__}, expected a list")
    for number, tool in enumerate(value):
        where = f"{name}[{number}]"
        if arguments.mapping(where, tool).get("type") != "function":
            raise InputError(f"{where}: type {str(tool.get('type'))[:60]!r}, expected 'function'")
        function = arguments.mapping(f"{where}.function", tool.get("function"))
        if not arguments.text(f"{where}.function.name", function.get("name")):
            raise InputError(f"{where}.function.name is empty")
        arguments.mapping(f"{where}.function.parameters", function.get("parameters", {}))
    return tuple(value)


def _structure(name: str, value: Any) -> Structure | None:
    kind = arguments.mapping(name, value).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.json_object()
    if kind != "json_schema":
        raise InputError(f"{name}: type {str(kind)[:60]!r}, expected text, json_object or json_schema")
    described = arguments.mapping(f"{name}.json_schema", value.get("json_schema"))
    return Structure.json_schema(arguments.mapping(f"{name}.json_schema.schema", described.get("schema")))


def _bias(name: str, value: Any) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in arguments.mapping(name, value).items()}
    except ValueError as error:
        raise InputError(f"{name}: its keys are token ids") from error


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = arguments.texts(name, value)
    if len(stops) > MAX_STOPS or not all(stops):
        raise InputError(f"{name} takes at most {MAX_STOPS} texts, none of them empty")
    return stops


def _positive(name: str, value: Any) -> int | None:
    return arguments.whole(name, value, 1)


def _within(most: int) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> int:
        if (found := arguments.whole(name, value, 0)) > most:
            raise InputError(f"{name} is {found}, expected 0 to {most}")
        return found

    return check


@contextmanager
def _at(param: str) -> Iterator[None]:
    """An InputError in here is a refusal of this parameter."""
    try:
        yield
    except InputError as error:
        raise Refusal(str(error), param=param, code="invalid_value") from error
