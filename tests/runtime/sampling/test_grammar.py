"""Which tokens a structure allows and forces, against languages small enough to be listed."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import numpy as np
import pytest

from ssdevice.errors import InputError, MissingExtraError
from ssdevice.runtime.sampling.choice import Chooser, truncated
from ssdevice.runtime.sampling.noise import gumbel
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.sampling.structure import MAX_CHARACTERS, Grammar, Structure, open_grammar
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.sampling.letters import letters
from tests.runtime.scripted import make_tokenizer

VOCAB = letters().tokenizer.get_vocab_size() + 5
"""Models have more rows than tokens."""
STOPS = set(letters().stop_ids)
COLOURS = ("red", "green", "grey")
LANGUAGES: dict[str, tuple[Structure, set[str]]] = {
    "regex": (
        Structure.regex("(red|green|grey)(, (red|green|grey)){0,2}"),
        {", ".join(words) for n in (1, 2, 3) for words in itertools.product(COLOURS, repeat=n)},
    ),
    "regex that may end early": (Structure.regex("na?(me)?"), {"n", "na", "nme", "name"}),
    "regex of several lines": (
        Structure.regex("(?x)\n  ( na | me )  # or /\n  [/]? \\/  # a slash\n  {1,2}\n"),
        {word + slashes for word in ("na", "me") for slashes in ("/", "//", "///")},
    ),
    "lark": (Structure.lark('start: "{{" word ~ 1..4 "}}"\nword: "x" | "\\"name\\","'), set()),
    "json": (
        Structure.json_schema(
            {
                "type": "object",
                "properties": {
                    "name": {"enum": ["me", 'Al"{{']},
                    "n": {"type": ["null", "boolean"]},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        ),
        {
            json.dumps({"name": name, **more})
            for name in ("me", 'Al"{{')
            for more in ({}, {"n": None}, {"n": True}, {"n": False})
        },
    ),
}
LANGUAGES["lark"][1].update(
    "{{" + "".join(words) + "}}"
    for n in range(1, 5)
    for words in itertools.product(("x", '"name",'), repeat=n)
)


def token_text(token: int) -> str:
    return "" if token >= letters().tokenizer.get_vocab_size() else letters().decode([token])


def begins(text: str, language: set[str]) -> bool:
    """Whether a word of the language begins with the text."""
    return any(word.startswith(text) for word in language)


def allowed(grammar: Grammar) -> set[int]:
    scores = grammar.masked(np.zeros(VOCAB, np.float32))
    return set(np.flatnonzero(np.isfinite(scores)).tolist())


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_structure_allows_what_its_language_has(name: str) -> None:
    structure, language = LANGUAGES[name]
    draw = np.random.default_rng(3)
    ends = set()
    forced = 0
    for _ in range(60):
        grammar = open_grammar(structure, letters(), VOCAB)
        text = ""
        while True:
            possible = set()
            for token in range(VOCAB):
                longer = token_text(token)
                if longer and begins(text + longer, language):
                    possible.add(token)
            if text in language:
                possible |= STOPS
            found = allowed(grammar)
            must = grammar.forced
            if (
                must and must[0] not in STOPS
            ):  # of several ways to write what is certain, the tokenizer's own
                assert found == {must[0]} <= possible
                assert begins(text + "".join(map(token_text, must)), language)
                forced += 1
            else:
                assert found == possible and (found == STOPS) is bool(must)
            token = int(draw.choice(sorted(found)))
            grammar.accept(token)
            if token in STOPS:
                ends.add(text)
                break
            text += token_text(token)
    assert ends <= language and len(ends) > 3 and forced >= 10


def test_tokens_after_the_end_are_not_forbidden_and_break_nothing() -> None:
    """A step may accept drafts after a stop token; the answer ends before them."""
    scores = np.zeros(VOCAB, np.float32)
    for stop in letters().stop_ids:
        grammar = open_grammar(Structure.regex("a"), letters(), VOCAB)
        for token in (*letters().encode("a"), stop, 7, stop, 9):
            assert np.isfinite(grammar.masked(scores)[token])
            grammar.accept(token)
        assert not grammar.forced and np.array_equal(grammar.masked(scores), scores)


def test_answers_of_one_structure_do_not_meet() -> None:
    structure = Structure.regex("(ab|cd)*")
    one, other = (open_grammar(structure, letters(), VOCAB) for _ in range(2))
    one.accept(letters().encode("a")[0])
    assert list(one.forced) == letters().encode("b")
    assert set(letters().encode("ac")) | STOPS == allowed(other)


def test_the_end_is_drafted_with_what_is_forced_before_it() -> None:
    grammar = open_grammar(Structure.regex("ab{3}"), letters(), VOCAB)
    assert list(grammar.forced) == [*letters().encode("abbb"), letters().stop_ids[0]]


WRONG: list[tuple[Any, str]] = [
    (lambda: Structure("yaml", "a"), "not one of json_schema, regex, lark"),
    (lambda: Structure.regex(""), "regular expression is empty"),
    (lambda: Structure.lark(" \n"), "Lark grammar is empty"),
    (lambda: Structure.regex(5), "regex is int"),  # type: ignore[arg-type]
    (lambda: Structure.regex("\ud800"), "not valid Unicode"),
    (lambda: Structure.regex("a" * (MAX_CHARACTERS + 1)), "at most"),
    (lambda: Structure.json_schema("{"), "the JSON schema: not JSON"),
    (lambda: Structure.json_schema("[]"), "expected an object"),
    (lambda: Structure.json_schema("true"), "expected an object"),
    (lambda: Structure.json_schema('{"type": "string", "type": "null"}'), "appears twice"),
    (lambda: Structure.json_schema({"const": float("nan")}), "no JSON"),
    (lambda: Structure.json_schema({"const": {1}}), "no JSON"),
    (lambda: Structure.json_schema('{"items":' * 101 + "{}" + "}" * 101), "deeper than 100"),
    (lambda: Structure.json_schema('{"items":' * 100_000), "deeper than 100"),
    (lambda: Sampling(structure="a"), "structure is str"),  # type: ignore[arg-type]
    (Structure.regex("["), "unclosed character class"),
    (
        Structure.regex("(?=a)b"),
        "regular expression cannot be used: .*look-around, .*not supported",
    ),
    (Structure.regex("a(b"), "unclosed group"),
    (Structure.regex(r"(a)\1"), "backreferences are not supported"),
    (Structure.regex(r"a\b"), "lookarounds not supported"),
    (Structure.regex("[z-a]"), "invalid character class range"),
    (Structure.regex("a{2,1}"), "invalid repetition count range"),
    (Structure.regex("a" * 300 + "(?!b)"), "look-around, .*not supported$"),
    (Structure.lark("start: /(?!a)b/"), "look-around, .*not supported"),
    (Structure.lark('start: "a'), "lexer error"),
    (Structure.lark("start: x"), 'unknown name: "x"'),
    (Structure.lark("start: <nope>"), 'unknown special token: "<nope>"'),
    (Structure.lark('start: %json {"pattern": "(?!a)b"}'), "look-around, .*not supported"),
    (Structure.json_schema({"pattern": "^(?!a)"}), "JSON schema cannot be used: look-around"),
    (Structure.json_schema({"patternProperties": {"(": {}}}), "unclosed group"),
    (Structure.json_schema({"items": {"pattern": r"\p{None}"}}), "Unicode property not found"),
    (
        Structure.json_schema(
            {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 13)]}
        ),
        "too much work|processor time|memory",
    ),
    (Structure.regex("ab\\"), "regular expression cannot be used"),
    (Structure.regex("ab\\\\\\"), "regular expression cannot be used"),
    (Structure.regex("(" * 5000 + "a" + ")" * 5000), "cannot be used"),
    (Structure.regex("[^\\x00-\\x{10FFFF}]"), "nothing matches it"),
    (Structure.regex("€"), "nothing matches it"),  # none of the tokens has these bytes
    (Structure.lark('x: "a"'), "no start rule"),
    (Structure.lark("start: start"), "nothing matches it"),
    (Structure.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
    (Structure.lark('%import python.grammar\nstart: "a"'), "Unknown common"),
    (Structure.json_schema({"type": "strng"}), "Invalid type: strng"),
    (Structure.json_schema({"$ref": "#"}), "nothing matches it"),
    (Structure.json_schema({"$ref": "file:///etc/passwd"}), "does not fetch"),
    (Structure.json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
    (Structure.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    (Structure.json_schema({"type": "integer", "multipleOf": 12345678}), "multipleOf"),
    (
        Structure.json_schema({"allOf": [{"multipleOf": 9973}, {"items": {"multipleOf": 9967}}]}),
        "multipleOf",
    ),
    (Structure.json_schema({"enum": [f"v{i * 7919}" for i in range(60_000)]}), "too big"),
    # These three ended the process.
    (Structure.json_schema({"const": -(2**63)}), "const has a number beyond 2"),
    (Structure.json_schema({"items": {"enum": [[{"a": -1e300}]]}}), "enum has a number beyond 2"),
    (
        Structure.json_schema({"type": "integer", "minimum": -(2**63), "maximum": 1 - 2**63}),
        "maximum has a number",
    ),
    (
        Structure.lark('start: "a" %json{"const":[-9223372036854775807]}'),
        "const has a number beyond 2",
    ),
    (Structure.lark('start: %json {"type":"integer","multipleOf":12345678}'), "multipleOf"),
    (
        Structure.json_schema({"const": {"id": 2**53 + 1}}),
        "const has a number beyond 2",
    ),  # 2^53 was written
    (
        Structure.json_schema({"enum": ["a", 1e20]}),
        "enum has a number beyond 2",
    ),  # 2^63 - 1 was written
]


@pytest.mark.parametrize(("made", "reason"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_used_is_refused_in_one_line(made: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        open_grammar(made() if callable(made) else made, letters(), VOCAB)
    said = str(refused.value)
    assert "\n" not in said and len(said) < 300 and not said.endswith((":", " "))


@pytest.mark.parametrize(
    "structure",
    [
        Structure.json_object(),
        Structure.json_schema({}),
        Structure.json_schema(
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
        ),
        Structure.json_schema({"items": {"multipleOf": 0.01}, "type": "array"}),
        Structure.json_schema(
            {"anyOf": [{"type": "integer", "maximum": 2**64 - 1}, {"const": "9" * 99}]}
        ),
        Structure.lark(
            'start: "%json" | %json {"enum": [9007199254740992, "-9223372036854775808"]}'
        ),
        Structure.lark('start: "%json {" /%json \\{/ # %json {'),
        Structure.lark("start: %json true"),
        Structure.json_schema({"properties": {"const": {}, "enum": {"maximum": 2**60}}}),
        Structure.regex("(a{1000}){1000}"),
        Structure.regex("(x+x+)+y"),
        Structure.regex(".*n.{300}n"),
    ],
    ids=range(12),
)
def test_recursion_and_bombs_can_be_used(structure: Structure) -> None:
    assert allowed(open_grammar(structure, letters(), VOCAB))


def test_an_error_of_the_library_is_an_error_of_its_answer_alone() -> None:
    """Such as a limit that is reached; here, a token that was not allowed."""
    structure = Structure.regex("[ab]+c")
    grammar = open_grammar(structure, letters(), VOCAB)
    with pytest.raises(InputError, match="the regular expression allows no answer") as refused:
        grammar.accept(letters().encode("c")[0])
    assert "\n" not in str(refused.value)
    assert allowed(open_grammar(structure, letters(), VOCAB)) == set(letters().encode("ab"))


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused() -> None:
    tokenizer: ChatTokenizer = make_tokenizer()
    with pytest.raises(InputError, match="no structures with this tokenizer"):
        open_grammar(Structure.regex("a"), tokenizer, tokenizer.tokenizer.get_vocab_size())


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = ChatTokenizer(letters().tokenizer, letters().chat)
    with pytest.raises(MissingExtraError, match=r"ssdevice\[structure\]"):
        open_grammar(Structure.regex("a"), fresh, VOCAB)


def test_the_mask_comes_after_processors_and_log_probabilities_are_the_models_own() -> None:
    """Processors see, and may change, the scores of tokens that the structure then excludes."""
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    a, b = letters().encode("ab")
    seen: list[float] = []

    def processor(ids: Any, scores: Any) -> Any:
        seen.append(float(scores[b]))
        return scores

    structure = Structure.regex("[ab]c")
    for bias, expected in ({a: 30.0}, a), ({b: 30.0}, b):
        asked = Sampling(logit_bias=bias, structure=structure, logprobs=1, processors=(processor,))
        chooser = Chooser(asked, [5], [0, 3], VOCAB, open_grammar(structure, letters(), VOCAB))
        assert chooser(logits) == expected
        best = int(np.argmax(logits))
        assert chooser.logprobs[0].ids == (best,)
        shifted = np.exp(logits.astype(np.float64))
        assert chooser.logprobs[0].chosen == pytest.approx(
            np.log(shifted[expected] / shifted.sum()), abs=1e-5
        )
        with pytest.raises(InputError, match="forbids every token"):
            banned = Sampling(suppress=tuple(letters().encode("c")), structure=structure)
            held = Chooser(banned, [5], [0, 3], VOCAB, open_grammar(structure, letters(), VOCAB))
            for _ in range(2):
                held(logits)
    assert len(seen) == 2 and np.isfinite(seen).all()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_p": 0.9, "min_p": 0.05},
        {"top_k": 3},
        {"typical_p": 0.8},
    ],
    ids=str,
)
def test_a_token_is_that_of_masked_scores_also_where_no_mask_was_needed(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = []
    masked = Grammar.masked
    monkeypatch.setattr(
        Grammar, "masked", lambda grammar, scores: masks.append(grammar) or masked(grammar, scores)
    )
    structure = Structure.regex("[a-f]{3}")
    likely = letters().encode("abcd")
    for seed in range(20):
        sampling = Sampling(temperature=1.0, seed=seed, structure=structure, **asked)
        own, beside = (open_grammar(structure, letters(), VOCAB) for _ in range(2))
        chooser = Chooser(sampling, [5], sorted(STOPS), VOCAB, own)
        draw = np.random.default_rng(seed)
        for position in range(1, 4):
            logits = draw.normal(size=VOCAB).astype(np.float32)
            logits[likely] += 4
            kept, ids = truncated(masked(beside, logits), sampling)
            ids = np.arange(VOCAB) if ids is None else ids
            expected = ids[np.argmax(kept + gumbel(seed, position, ids, VOCAB))]
            assert chooser(logits) == expected
            beside.accept(int(expected))
        own.close()
        beside.close()
    assert len(masks) == 60 if "typical_p" in asked else 0 < len(masks) < 50
