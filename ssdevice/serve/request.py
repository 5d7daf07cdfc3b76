"""Requests in OpenAI's form, checked: what a session is asked for."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ssdevice import arguments, strict_json
from ssdevice.errors import InputError
from ssdevice.runtime.sampling.options import DRAWING, Sampling
from ssdevice.runtime.sampling.structure import Structure
from ssdevice.serve.guard import Refusal
from ssdevice.text.tools import ToolStyle, functions_of

MAX_DEPTH = 128
"""Levels of lists and objects in a request."""
MAX_STOPS = 16
DRAWN_SEEDS = 1 << 31
"""Seeds of requests without one; JavaScript and int32 hold all of them."""
COMPLETION_TOKENS = 16
"""OpenAI's default for completions; answers of a chat end by themselves, or with the context."""
CHOICE = (*DRAWING, "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Parameters that are fields of Sampling; it checks them."""
Check: TypeAlias = Callable[[str, Any], Any]
"""``(name, value) -> value``; raises InputError, or Refusal."""


@dataclass(frozen=True)
class Request:
    """What to decode: either ``messages`` with ``tools`` and ``template`` arguments, or a
    ``prompt``, text or ids.

    ``sampling``: the fields of Sampling that were named, ``structure`` among them, and a seed if
    tokens are drawn. ``forced``: functions of which the answer must call one. ``most_calls``: how
    many calls the answer may have; None for any. ``max_tokens``: None for what the context takes.
    ``logprobs``: how many alternatives; None for no log-probabilities. ``usage``: whether a stream
    ends with it.
    """

    app: str
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    forced: Sequence[Mapping[str, Any]] = ()
    most_calls: int | None = None
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
        return Sampling.draws(self.sampling)

    def style(self, template: str | None) -> ToolStyle | None:
        """How calls in the answer are written; None if there can be none, or in a form that is not
        read.
        """
        if self.forced:
            return ToolStyle.forced(template)
        return ToolStyle.of(template) if self.tools else None


def chat_request(content: bytes) -> Request:
    """The request of ``/v1/chat/completions``. Raises Refusal, InputError."""
    given = _parameters(content, CHAT, "messages")
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise Refusal(
            "max_tokens and max_completion_tokens are one setting: give one of them",
            param="max_tokens",
        )
    alternatives = given.get("top_logprobs", 0)
    if alternatives and not given.get("logprobs"):
        raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
    tools, forced = _choice(given.get("tools", ()), given.get("tool_choice", "auto"))
    if tools and given.get("response_format"):
        raise Refusal(
            "response_format cannot go with tools; tool_choice: none leaves them out", param="tools"
        )
    return Request(
        messages=given["messages"],
        tools=tools,
        forced=forced,
        most_calls=None if given.get("parallel_tool_calls", True) else 1,
        template=given.get("chat_template_kwargs"),
        max_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
        logprobs=alternatives if given.get("logprobs") else None,
        **_common(given),
    )


def text_request(content: bytes) -> Request:
    """The request of ``/v1/completions``. Raises Refusal, InputError."""
    given = _parameters(content, TEXT, "prompt")
    most = given.get("max_tokens", COMPLETION_TOKENS)
    logprobs = given.get("logprobs")
    return Request(prompt=given["prompt"], max_tokens=most, logprobs=logprobs, **_common(given))


def _parameters(content: bytes, known: Mapping[str, Check], *needed: str) -> dict[str, Any]:
    """The parameters of a request that have a value, checked."""
    given = strict_json.parse(content, "the request", InputError, MAX_DEPTH)
    if not isinstance(given, dict):
        raise Refusal(f"the request is {type(given).__name__}, expected a JSON object")
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in known:
            raise Refusal(
                strict_json.unknown_key(name, known), param=name[:60], code="unknown_parameter"
            )
        try:
            found[name] = known[name](name, value)
        except InputError as error:
            raise Refusal(str(error), param=name, code="invalid_value") from error
    for name in ("model", *needed):
        if name not in found:
            raise Refusal(f"{name} is missing", param=name, code="missing_required_parameter")
    return found


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: given[name] for name in (*CHOICE, "logit_bias") if name in given}
    if Sampling.draws(sampling):
        sampling.setdefault("seed", random.randrange(DRAWN_SEEDS))
    if structure := given.get("response_format"):
        sampling["structure"] = structure
    stream = given.get("stream", False)
    options = given.get("stream_options")
    if options is not None and (not stream or options.keys() - {"include_usage"}):
        raise Refusal(
            "stream_options goes with stream: true, and has include_usage only",
            param="stream_options",
        )
    usage = arguments.flag("include_usage", (options or {}).get("include_usage", False))
    app = given["model"]
    stop = given.get("stop", ())
    return {"app": app, "stop": stop, "sampling": sampling, "stream": stream, "usage": usage}


def _choice(tools: Sequence[Any], choice: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The tools that the model is told of, and those of which it must call one."""
    if choice == "auto":
        return tools, ()
    if choice == "none":
        return (), ()
    if not tools:
        raise Refusal("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return tools, tools
    forced = [tool for tool in tools if tool["function"]["name"] == _chosen_name(choice)]
    if not forced:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise Refusal(
            f"tool_choice names none of the functions {names}",
            param="tool_choice",
            code="invalid_value",
        )
    return tools, forced


def _chosen_name(choice: Any) -> Any:
    """The name in ``{"type": "function", "function": {"name": ..}}``; None for another form."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _functions(_: str, value: Any) -> list[Any]:
    functions_of(value)
    return list(value)


def _structure(name: str, value: Any) -> Structure | None:
    kind = arguments.mapping(name, value).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.json_object()
    if kind != "json_schema":
        raise InputError(
            f"{name}: type {str(kind)[:60]!r}, expected text, json_object or json_schema"
        )
    described = arguments.mapping(f"{name}.json_schema", value.get("json_schema"))
    return Structure.json_schema(
        arguments.mapping(f"{name}.json_schema.schema", described.get("schema"))
    )


def _bias(name: str, value: Any) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in arguments.mapping(name, value).items()}
    except ValueError as error:
        raise InputError(f"{name}: its keys are token ids") from error


def _prompt(name: str, value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    return arguments.wholes(f"{name}, where it is not one text,", value)


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = arguments.texts(name, value)
    if len(stops) > MAX_STOPS or not all(stops):
        raise InputError(f"{name} takes at most {MAX_STOPS} texts, none of them empty")
    return stops


def _only(neutral: Any) -> Check:
    """A parameter that has only this value here and asks for nothing: clients send it unasked."""

    def check(name: str, value: Any) -> None:
        if json.dumps(value) != json.dumps(neutral):
            raise Refusal(
                f"{name} can only be {json.dumps(neutral)} here",
                param=name,
                code="unsupported_value",
            )

    return check


_as_given: Check = lambda _, value: value  # noqa: E731
_positive: Check = partial(arguments.whole, least=1)
COMMON: dict[str, Check] = {
    "model": arguments.text,
    "stream": arguments.flag,
    "stream_options": arguments.mapping,
    "max_tokens": _positive,
    "stop": _stops,
    "logit_bias": _bias,
    "user": arguments.text,
    **dict.fromkeys(CHOICE, _as_given),
    "n": _only(1),
    "best_of": _only(1),
    "echo": _only(False),
    "suffix": _only(""),
    "store": _only(False),
    "service_tier": _only("auto"),
}
CHAT: dict[str, Check] = COMMON | {
    "messages": _as_given,
    "max_completion_tokens": _positive,
    "logprobs": arguments.flag,
    "top_logprobs": partial(arguments.whole, least=0, most=20),
    "response_format": _structure,
    "tools": _functions,
    "tool_choice": _as_given,
    "parallel_tool_calls": arguments.flag,
    "chat_template_kwargs": arguments.mapping,
}
TEXT: dict[str, Check] = COMMON | {
    "prompt": _prompt,
    "logprobs": partial(arguments.whole, least=0, most=5),
}
