"""Calls of random functions, by an answer that is random wherever the grammar leaves a choice.

What the client is given is judged by jsonschema, against the schemas that it sent.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from ssdevice.errors import InputError
from ssdevice.runtime.sampling.structure import Structure, call_structure, open_grammar
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.sampling.letters import letters
from tests.serve.replies import FENCE, TEMPLATES, given, requested, tokenizer
from tests.serve.tool_schemas import random_tool

LONG = 250
"""Tokens after which a random answer ends its strings and lists as soon as it may."""


def random_answer(structure: Structure, tokenizer: ChatTokenizer, seed: int) -> list[int]:
    """Tokens up to a stop token, each drawn among those that the structure allows."""
    draw = np.random.default_rng(seed)
    vocab = tokenizer.tokenizer.get_vocab_size()
    grammar = open_grammar(structure, tokenizer, vocab)
    taste = draw.normal(size=vocab, scale=2.0)
    ends = np.zeros(vocab)
    for text in ('"', "}", "]"):
        ends[tokenizer.encode(text)[0]] = 1.0
    for digit in "0123456789":  # Python reads no whole number of more than 4300
        ends[tokenizer.encode(digit)[0]] = -1.0
    tokens = list[int]()
    while not tokens or tokens[-1] not in tokenizer.stop_ids:
        scores = taste + draw.gumbel(size=vocab) + ends * (1.0 if len(tokens) < LONG else 99.0)
        tokens.append(int(np.argmax(grammar.masked(scores.astype(np.float32)))))
        grammar.accept(tokens[-1])
    return tokens


def check(message: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, str]:
    """The name and the arguments of the one call in a message, which fits its schema."""
    assert message["content"] is None, message
    (call,) = message["tool_calls"]
    name = call["function"]["name"]
    text = call["function"]["arguments"]
    arguments = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (tool,) = [tool for tool in tools if tool["function"]["name"] == name]
    schema = tool["function"].get("parameters") or {}
    assert isinstance(arguments, dict), text
    assert Draft202012Validator(schema).is_valid(arguments), (schema, text)
    return name, text


def try_tools(seed: int) -> bool:
    """Whether calls of random functions can be required; then each of them fits."""
    random = Random(seed)
    tools = [random_tool(random, name) for name in random.sample(("look", "now", 'a "b"'), 2)]
    named = random.choice(tools)
    chosen = {"type": "function", "function": {"name": named["function"]["name"]}}
    model = tokenizer(random.choice(list(TEMPLATES)), random.choice([True, False, None]))
    for choice in (chosen, "required"):
        for stream in (False, True):
            request = requested(tools, choice, stream=stream)
            style = request.style(model.chat.template)
            assert style is not None
            structure = call_structure(request.forced, style, model)
            try:
                tokens = random_answer(structure, model, seed)
            except InputError:
                check_refused(request.forced)
                return False
            name, text = check(given(request, model, tokens), tools)
            assert choice == "required" or name == named["function"]["name"]
    check_auto(name, text, tools)
    return True


def check_refused(tools: Any) -> None:
    """A refusal is of the client's own schemas, not of what is added to them."""
    refused = 0
    for tool in tools:
        parameters = tool["function"].get("parameters") or {}
        try:
            open_grammar(Structure.json_schema({**parameters, "type": "object"}), letters(), 99)
        except InputError:
            refused += 1
    assert refused, tools


def check_auto(name: str, text: str, tools: list[dict[str, Any]]) -> None:
    """The same call is found where a model writes it by itself, with marks and without."""
    model = tokenizer("Hermes", False)
    call = f'{{"name": {json.dumps(name)}, "arguments": {text}}}'
    for written in (f"<tool_call>\n{call}\n</tool_call>", call, f"{FENCE}json\n{call}\n{FENCE}"):
        tokens = [*model.encode(written), model.stop_ids[0]]
        for stream in (False, True):
            message = given(requested(tools, stream=stream), model, tokens)
            assert check(message, tools) == (name, text)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(40, 2000, marks=pytest.mark.slow)]
)
def test_calls_of_random_functions_fit_their_schemas(first: int, count: int) -> None:
    usable = sum(try_tools(seed) for seed in range(first, first + count))
    assert usable >= 0.85 * count
