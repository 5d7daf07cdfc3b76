"""Messages of a conversation in OpenAI's form, checked, and what else a chat template is given."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ssdevice import arguments, strict_json
from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.text.calls import json_value
from ssdevice.text.frames import Message

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"
TOOL = "tool"
CALLS = "tool_calls"
CALL_ID = "tool_call_id"
CALLED = "tool calls"
FOLLOWS = {
    "": (SYSTEM, USER),
    SYSTEM: (USER,),
    USER: (ASSISTANT,),
    ASSISTANT: (USER,),
    CALLED: (TOOL,),
    TOOL: (TOOL, ASSISTANT),
}
"""A role, or an assistant's tool calls -> the roles that may come after."""
KEYS = {
    SYSTEM: ("name",),
    USER: ("name",),
    ASSISTANT: ("name", CALLS, "reasoning_content"),
    TOOL: ("name", CALL_ID),
}
"""A role -> the keys that its messages may have besides role and content."""
ERROR = "error"
DROP_OLDEST = "drop-oldest"
OVERFLOWS = (ERROR, DROP_OLDEST)
"""What becomes of a conversation that outgrows the context."""
OF_HOST = ("messages", "add_generation_prompt", "tools")
"""What a template is given otherwise than as an argument."""


@dataclass(frozen=True)
class Chat:
    """A conversation and what its template is given: ``tools`` (JSON schemas) and further
    ``template`` arguments.

    Messages of the user are without an app's instruction.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)

    def given(self, tools: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None) -> Self:
        """With these tools and template arguments, if any.

        Raises InputError for what JSON cannot hold.
        """
        schemas = [dict(tool) for tool in arguments.objects("tools", tools)]
        for name in arguments.mapping("template", {} if template is None else template):
            if arguments.text("a name in template", name) in OF_HOST:
                raise InputError(
                    f"template: {name!r} is no argument of it; give it as an option of its own"
                )
        values = self.template if template is None else _json("template", dict(template))
        return replace(self, tools=tuple(_json("tools", schemas)) or self.tools, template=values)

    def instructed(self, system: str | None) -> Self:
        """With another system message; None changes nothing."""
        if system is None:
            return self
        rest = self.messages[self.messages[:1] != () and self.messages[0]["role"] == SYSTEM :]
        return replace(
            self, messages=({"role": SYSTEM, "content": arguments.text("system", system)}, *rest)
        )

    def asked(self, prompt: str) -> Self:
        """With the user's next message. Raises InputError for one without words."""
        if not arguments.text("prompt", prompt).strip():
            raise InputError("the prompt is empty")
        return self.then(USER, prompt)

    def then(self, role: str, content: str) -> Self:
        return replace(self, messages=(*self.messages, {"role": role, "content": content}))

    @property
    def turns(self) -> list[int]:
        return [at for at, message in enumerate(self.messages) if message["role"] == USER]

    def without(self, turns: int) -> Self:
        """Without the oldest turns, each a user's message and all up to the next one; the system
        message stays.
        """
        starts = self.turns
        return replace(
            self, messages=(*self.messages[: starts[0]], *self.messages[starts[turns] :])
        )


def requested(
    before: Chat,
    prompt: str | None,
    messages: Sequence[Message] | None,
    system: str | None,
    tools: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any] | None,
) -> Chat:
    """What is to be answered: the next ``prompt`` of the conversation ``before``, or the whole
    conversation ``messages``.

    Other arguments that are given replace those of ``before``. Raises InputError.
    """
    if (prompt is None) == (messages is None):
        raise InputError(
            "give either the prompt, the user's next message, or messages, a whole conversation"
        )
    if messages is not None:
        before = Chat(checked(messages))
        if system is not None and before.messages[0]["role"] == SYSTEM:
            raise InputError("system: the messages have a system message of their own")
    chat = before.given(tools, template).instructed(system)
    return chat if prompt is None else chat.asked(prompt)


def fitting(
    chat: Chat, ids_of: Callable[[Chat], list[int]], context: int, overflow: str, max_tokens: int
) -> tuple[list[int], Chat]:
    """The tokens of a conversation, and what is left of it with DROP_OLDEST, which makes it fit
    together with its answer.

    The answer has room for ``max_tokens``, at most half of the context. As few turns as possible
    are dropped, the oldest first, but never the last one. Raises InputError for another
    ``overflow``.
    """
    if overflow not in OVERFLOWS:
        raise InputError(
            f"overflow is {repr(overflow)[:60]}, expected {' or '.join(map(repr, OVERFLOWS))}"
        )
    if overflow == ERROR:
        return ids_of(chat), chat
    room = min(max_tokens, context // 2)
    most = len(chat.turns) - 1
    found: dict[int, list[int]] = {}

    def fits(turns: int) -> bool:
        try:
            found[turns] = ids_of(chat.without(turns))
        except ContextOverflowError:
            return False
        return len(found[turns]) + room <= context

    # Most conversations fit whole.
    turns = 0 if fits(0) else bisect_left(range(most), True, lo=min(1, most), key=fits)
    kept = chat.without(turns)
    return found[turns] if turns in found else ids_of(kept), kept


ANSWERED = (USER, TOOL)
WAITING = ("", SYSTEM, ASSISTANT)
"""What a conversation ends with for the model to answer, and for the user to speak next."""


def checked(messages: Any, ends: Sequence[str] = ANSWERED) -> tuple[Message, ...]:
    """The messages of a conversation, as templates take them.

    ``ends``: ANSWERED or WAITING. A content is a string, or a list of text parts, which become
    lines. Arguments of tool calls are an object, or its JSON as OpenAI sends it; None and "" are
    {}. Raises InputError for another form or order.
    """
    last = ""
    ids = set[str]()
    found = []
    for number, given in enumerate(arguments.objects("messages", messages)):
        where = f"messages[{number}]"
        message = _message(where, given)
        role = message["role"]
        if role not in FOLLOWS[last]:
            place = f"come after {last!r}" if last else "be the first"
            raise InputError(
                f"{where}: role {role!r} cannot {place}; expected {' or '.join(FOLLOWS[last])}"
            )
        if role == TOOL and ids and message.get(CALL_ID, "") not in ids:
            raise InputError(
                f"{where}: {CALL_ID} {message.get(CALL_ID)!r} is none of the calls {', '.join(ids)}"
            )
        if calls := message.get(CALLS):
            ids = {call["id"] for call in calls if "id" in call}
        last = CALLED if calls else role
        found.append(message)
    if last not in ends:
        roles = " or ".join(filter(None, ends))
        if not last:
            raise InputError(f"messages is empty; the last one must be of role {roles}")
        raise InputError(f"messages ends with {last!r}; the last one must be of role {roles}")
    return tuple(found)


def _message(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the keys that have no value."""
    role = given.get("role")
    if not isinstance(role, str) or role not in KEYS:
        raise InputError(f"{where}: role {repr(role)[:60]}, expected {', '.join(KEYS)}")
    message: dict[str, Any] = {
        "role": role,
        "content": _content(f"{where}: content", given.get("content"), role),
    }
    for key, value in given.items():
        if key in message or value is None or value == []:
            continue
        if key not in KEYS[role]:
            known = ("role", "content", *KEYS[role])
            raise InputError(f"{where}: {strict_json.unknown_key(str(key), known)}")
        message[key] = (
            _calls(f"{where}: {key}", value)
            if key == CALLS
            else arguments.text(f"{where}: {key}", value)
        )
    if not message["content"].strip() and role == USER:
        raise InputError(f"{where}: the message of the user is empty")
    return message


def _content(what: str, value: Any, role: str) -> str:
    if not isinstance(value, list):
        return "" if value is None and role == ASSISTANT else arguments.text(what, value)
    for number, part in enumerate(arguments.objects(what, value)):
        if (kind := part.get("type")) != "text":
            raise InputError(
                f"{what}[{number}]: a part of type {repr(kind)[:60]}; the model reads text only"
            )
    return "\n".join(
        arguments.text(f"{what}[{i}]: text", part.get("text")) for i, part in enumerate(value)
    )


def _calls(what: str, value: Any) -> list[Any]:
    found = []
    for number, call in enumerate(arguments.objects(what, value)):
        where = f"{what}[{number}].function"
        function = dict(arguments.mapping(where, call.get("function")))
        arguments.text(f"{where}.name", function.get("name"))
        function["arguments"] = _arguments(f"{where}.arguments", function.get("arguments"))
        if "id" in call:
            arguments.text(f"{what}[{number}].id", call["id"])
        found.append({**call, "function": function})
    return list(_json(what, found))


def _arguments(where: str, given: Any) -> Any:
    """The arguments of a call: an object, or its JSON as it was written, perhaps by a model; None
    and "" are {}.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    value = given
    if isinstance(given, str):
        try:
            value = json_value(given)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({error}): {given[:60]!r}") from error
    arguments.mapping(where, value)
    return given


def with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    """A message with the arguments of its calls in another form."""
    calls = []
    for call in message.get(CALLS, ()):
        function = {**call["function"], "arguments": form(call["function"]["arguments"])}
        calls.append({**call, "function": function})
    return {**message, CALLS: calls} if calls else message


def with_outside(message: Message, form: Callable[[Any], Any]) -> Message:
    """A message with all that is not the template's in another form, but for arguments of calls."""
    calls = []
    for call in message.get(CALLS, ()):
        function = dict(call["function"])
        given = function.pop("arguments")
        rest = {key: value for key, value in call.items() if key != "function"}
        calls.append({**form(rest), "function": {**form(function), "arguments": given}})
    changed = {
        key: value if key in ("role", CALLS) else form(value) for key, value in message.items()
    }
    return {**changed, CALLS: calls} if calls else changed


def arguments_object(given: Any) -> Any:
    """The arguments of a call as an object; ``given``: it, or its JSON."""
    return json_value(given) if isinstance(given, str) else given


def arguments_text(given: Any) -> str:
    """The arguments of a call as JSON: as they were written, if they were given so."""
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _json(what: str, value: Any) -> Any:
    """A copy of a value that JSON can hold."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} cannot be written as JSON: {error}") from error
