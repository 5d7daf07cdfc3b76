"""Which calls of an answer a client is given, and which text, whole and in a stream."""

from __future__ import annotations

import pytest

from tests.serve.replies import given, requested, tokenizer
from tests.serve.serving import tool

CALL = '<tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>'
BARE = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
OTHER = '<tool_call>{"name": "now"}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("special", [False, True, None])
@pytest.mark.parametrize(
    ("text", "thinking", "content", "called"),
    [
        (CALL, False, "", ["look"]),
        (BARE, False, "", ["look"]),
        (f"```json\n{BARE}\n```", False, "", ["look"]),
        (f"{CALL}{OTHER}", False, "", ["look", "now"]),
        (f"<think>Or {OTHER}?</think>{CALL}", False, f"<think>Or {OTHER}?</think>", ["look"]),
        (f"<think>Or {OTHER}?</think>{BARE}", False, f"<think>Or {OTHER}?</think>", ["look"]),
        (f"<think>Or {OTHER}?</think>No.", False, f"<think>Or {OTHER}?</think>No.", []),
        (f"<think>Or {OTHER}?", False, f"<think>Or {OTHER}?", []),
        (f"Or {OTHER}?</think>{CALL}", True, f"Or {OTHER}?</think>", ["look"]),
        (f"Or {OTHER}?", True, f"Or {OTHER}?", []),
        (f"Or {OTHER}?</think>No.", False, f"Or {OTHER}?</think>No.", []),
        (CALL.replace("Rome", "</think>"), False, "", ["look"]),
        (CALL.replace("look", "hide"), False, CALL.replace("look", "hide"), []),
        ('{"name": "Ada", "age": 36}', False, '{"name": "Ada", "age": 36}', []),
        ("```json\n{}\n```", False, "```json\n{}\n```", []),
    ],
)
def test_a_client_is_given_calls_and_text(
    text: str, thinking: bool, content: str, called: list[str], special: bool | None, stream: bool
) -> None:
    model = tokenizer("Hermes", special)
    tokens = [*model.encode(text), model.stop_ids[0]]
    # Special tokens are not shown.
    shown = model.decode(model.encode(content))
    tools = [tool(city={"type": "string"}), tool("now")]
    for most in (True, False):
        request = requested(tools, stream=stream, parallel_tool_calls=most)
        message = given(request, model, tokens, thinking)
        assert (message["content"] or "") == shown
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        assert names == (called if most else called[:1])
