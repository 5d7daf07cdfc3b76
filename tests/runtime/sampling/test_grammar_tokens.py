"""Text of added tokens in structures: it is written as these tokens, whatever their flags."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken

from ssdevice.runtime.sampling.structure import Structure, call_structure, open_grammar
from ssdevice.text.tokenizer import ChatTokenizer, load_tokenizer
from ssdevice.text.tools import ToolStyle, answer_text, parse_calls
from tests.runtime.sampling.letters import letters

THINK, END, WORD = MARKS = ("<think>", "</think>", "[X]")
CALL = ("<tool_call>", "</tool_call>")


@cache
def marked(special: bool) -> ChatTokenizer:
    tokenizer = load_tokenizer(letters().tokenizer_json, "letters")
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in (*MARKS, *CALL)])
    return ChatTokenizer(tokenizer, letters().chat)


def answer(
    structure: Structure, tokenizer: ChatTokenizer, likes: Callable[[str], bool] = bool
) -> list[str]:
    """The tokens of an answer: where there is a choice, one that it ``likes``, of the lowest id."""
    vocab = tokenizer.tokenizer.get_vocab_size()
    names = [tokenizer.tokenizer.id_to_token(i) for i in range(vocab)]
    scores = np.array([(100.0 if likes(name) else 0.0) - i / vocab for i, name in enumerate(names)])
    grammar = open_grammar(structure, tokenizer, vocab)
    tokens = list[int]()
    while not tokens or tokens[-1] not in tokenizer.stop_ids:
        tokens.append(int(np.argmax(grammar.masked(scores.astype(np.float32)))))
        grammar.accept(tokens[-1])
    return [names[token] for token in tokens[:-1]]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "structure",
    [
        Structure.regex(r"<think>a</think>b\[X\]"),
        Structure.lark('start: "<think>a</think>b[X]"'),
        Structure.lark('start: <think> "a" </think> "b" "[X]"  // "quoted"'),
        Structure.lark("start: /<think>a<\\/think>/ b\nb: /b\\[X\\]/"),
    ],
)
def test_a_mark_is_written_as_its_token(structure: Structure, special: bool) -> None:
    found = answer(structure, marked(special))
    assert found == [THINK, "a", END, "b", WORD]
    assert list(open_grammar(structure, marked(special), 200).forced)[:-1] == [
        marked(special).tokenizer.token_to_id(token) for token in found
    ]


@pytest.mark.parametrize("special", [False, True])
def test_what_a_rule_names_without_quotes_is_no_text(special: bool) -> None:
    """So that text before it ends there."""
    tokenizer = marked(special)
    end = tokenizer.tokenizer.token_to_id(END)
    for name in (END, f"<[{end}]>", f"<[{end - 1}-{end}]>"):
        grammar = open_grammar(Structure.lark(f'start: /[a-z<>]*/ {name} "b"'), tokenizer, 200)
        for token in (*tokenizer.encode("a"), end, *tokenizer.encode("b")):
            grammar.accept(token)
        assert list(grammar.forced) == [tokenizer.stop_ids[0]]


def test_special_tokens_are_no_text_where_they_are_not_spelled() -> None:
    def likes(name: str) -> bool:
        return name in MARKS

    anything = Structure.regex("(?s:.{3})")
    assert not set(answer(anything, marked(True), likes)) & {*MARKS, "<user>"}
    assert answer(Structure.regex("(?s:.{15})"), marked(False), likes) == [THINK, THINK, "Ġ"]


@pytest.mark.parametrize("special", [False, True])
def test_a_string_of_json_has_the_text_of_a_mark(special: bool) -> None:
    """Special tokens are not shown, so there it is written in pieces."""
    tokenizer = marked(special)
    found = answer(Structure.json_schema({"const": "a<think>b<user></s>"}), tokenizer)
    ids = [tokenizer.tokenizer.token_to_id(token) for token in found]
    assert tokenizer.decode(ids) == '"a<think>b<user></s>"'
    assert (THINK in found) is not special


@pytest.mark.parametrize("special", [False, True])
def test_calls_that_are_required_are_between_tokens(special: bool) -> None:
    parameters = {"properties": {"a": {"enum": ["</tool_call>", "<think>"]}}, "required": ["a"]}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    tokenizer = marked(special)
    found = answer(call_structure(tools, ToolStyle.HERMES, tokenizer), tokenizer)
    assert (found[0], found[-1]) == CALL
    ids = [tokenizer.tokenizer.token_to_id(token) for token in found]
    (call,) = parse_calls(answer_text(tokenizer, ids), ToolStyle.HERMES)[1]
    assert call.arguments["a"] in parameters["properties"]["a"]["enum"]
