"""Grammars that would end a process, take its memory or hold it up: only their answer ends."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ssdevice.errors import InputError
from ssdevice.runtime.sampling import followers, processes
from ssdevice.runtime.sampling.followers import Followers
from ssdevice.runtime.sampling.grammar_tokens import spelled_anywhere
from ssdevice.runtime.sampling.matching import OUT_OF_MEMORY, GrammarError
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.sampling.processes import Allowance, Processes
from ssdevice.runtime.sampling.schemas import MAX_LEVELS, SMALL_CHARACTERS, Schema
from ssdevice.runtime.sampling.structure import Grammar, Structure, open_grammar
from ssdevice.runtime.session import Session
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.sampling.letters import letters
from tests.runtime.tiny_bundle import tiny_bundle

VOCAB = letters().tokenizer.get_vocab_size()
Link = Callable[[Any], dict[str, Any]]
LINKS: dict[str, Link] = {
    "properties": lambda inner: {"type": "object", "properties": {"x": inner}},
    "references": lambda inner: inner,
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "null"}]},
    "oneOf": lambda inner: {"oneOf": [{"type": "null"}, inner]},
    "allOf": lambda inner: {"allOf": [inner]},
    "items": lambda inner: {"type": "array", "items": inner},
    "prefixItems": lambda inner: {"type": "array", "prefixItems": [inner]},
    "keys": lambda inner: {"type": "object", "additionalProperties": inner},
    "keys by pattern": lambda inner: {"type": "object", "patternProperties": {"^x": inner}},
}


def chain(link: Link, length: int) -> dict[str, Any]:
    """A schema whose definitions refer to one another, each to the next."""
    definitions = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    definitions[f"a{length}"] = {"type": "integer"}
    return {"$ref": "#/$defs/a0", "$defs": definitions}


def names(name: str, length: int) -> str:
    """A Lark grammar whose names refer to one another, each to the next."""
    lines = [f'{name}{i}: {name}{i + 1} "b"' for i in range(length)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{length}: "a"'])


@pytest.fixture
def apart() -> Iterator[Processes]:
    """Processes that are allowed little."""
    tokenizer = letters()
    yield Processes(
        tokenizer.tokenizer_json,
        VOCAB,
        list(tokenizer.stop_ids),
        allowance=Allowance(seconds=0.4, memory=1 << 26),
    )


def fresh() -> ChatTokenizer:
    """A tokenizer for which nothing has been compiled yet."""
    return ChatTokenizer(letters().tokenizer, letters().chat)


def processes_of(tokenizer: ChatTokenizer) -> Processes:
    return followers_of(tokenizer, VOCAB).processes


def followers_of(tokenizer: ChatTokenizer, vocab: int) -> Followers:
    """Those of structures in which no added token is written that is not text anywhere."""
    return followers.followers_of(tokenizer, vocab, spelled_anywhere(tokenizer))


@pytest.mark.parametrize("link", LINKS)
def test_levels_of_a_schema_are_counted_through_references(link: str) -> None:
    deep = Structure.json_schema(chain(LINKS[link], MAX_LEVELS + 1))
    with pytest.raises(InputError, match=r"JSON schema is \d+ levels deep through its references"):
        open_grammar(deep, letters(), VOCAB)
    within = Structure.lark(f"start: %json {deep.source}")
    with pytest.raises(InputError, match=r"\d+ levels deep through its references"):
        open_grammar(within, letters(), VOCAB)


@pytest.mark.parametrize("name", ["r", "T", "_T", "?r"])
def test_levels_of_a_lark_grammar_are_counted_through_names(name: str) -> None:
    with pytest.raises(InputError, match=r"Lark grammar is \d+ levels deep through its names"):
        open_grammar(Structure.lark(names(name, MAX_LEVELS + 1)), letters(), VOCAB)


@pytest.mark.parametrize("link", sorted(LINKS.keys() - {"oneOf"}))
def test_deep_schemas_that_are_allowed_are_compiled(link: str) -> None:
    """Their process has a stack for all the levels that are allowed."""
    schema = chain(LINKS[link], 120 if link == "allOf" else MAX_LEVELS // 3)
    open_grammar(Structure.json_schema(schema), letters(), VOCAB).close()


def test_schemas_that_refer_to_themselves_have_levels_like_others() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a0"}}}
    definitions = {f"a{i}": LINKS["items"]({"$ref": f"#/$defs/a{i + 1}"}) for i in range(9)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**definitions, "a9": tree}}
    open_grammar(Structure.json_schema(schema), letters(), VOCAB).close()
    assert not Schema(schema).small


HOSTILE = {
    "an intersection": (
        "json",
        json.dumps({"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 18)]}),
        "processor time|memory|fuel",
    ),
    "optional characters": ("lark", "start: /" + "a?" * 20_000 + "a" * 20_000 + "/", "memory"),
    "a chain": ("json", json.dumps(chain(LINKS["properties"], 30_000)), r"broke|memory"),
    "a chain of rules": ("lark", names("r", 40_000), r"broke|memory"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_takes_too_much_ends_by_itself(name: str, apart: Processes) -> None:
    kind, source, reason = HOSTILE[name]
    before = apart.open("lark", "start: /[a-f]+/")
    with pytest.raises(GrammarError, match=reason) as refused:
        apart.open(kind, source)
    assert "\n" not in str(refused.value)
    before.accept(letters().encode("a")[0])  # the answers of others go on
    assert before.allows(letters().encode("b")[0])
    before.close()
    again = apart.open("lark", "start: /[a-f]+/")
    assert again.allows(letters().encode("c")[0])
    again.close()


def test_what_takes_too_long_ends_one_process(apart: Processes) -> None:
    apart.allowance = Allowance(seconds=0.4, memory=1 << 30)
    held = [apart.open("lark", f"start: /[a-f]{{{i}}}/") for i in (1, 2)]
    for each in held:
        each.close()
    with pytest.raises(GrammarError, match="processor time"):
        apart.open(*HOSTILE["an intersection"][:2])
    assert len(apart._idle) == 1


def test_what_other_grammars_left_is_no_limit(
    apart: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar for which too little memory is left is compiled in another process."""
    for multiple in (9_973, 9_967, 9_949, 9_941, 9_931, 9_929):
        schema = json.dumps({"type": "integer", "multipleOf": multiple})
        monkeypatch.setattr(processes, "KEPT_BYTES", 1 << 30)
        apart.allowance = Allowance(seconds=20, memory=1 << 24)
        apart.open("json", schema).close()


def test_an_answer_that_takes_too_much_ends_by_itself(apart: Processes) -> None:
    """Automata grow with the text: each state of this one is new, and large."""
    tokens = letters().encode("ab")
    draw = np.random.default_rng(0)
    apart.allowance = replace(apart.allowance, memory=1 << 24)
    endless = apart.open("lark", "start: /(a|b)*a(a|b){900}/")
    with pytest.raises(GrammarError, match="memory|processor time|too many") as ended:
        for _ in range(100_000):
            endless.accept(int(draw.choice(tokens)))
            endless.mask()
    assert "\n" not in str(ended.value)
    with pytest.raises(GrammarError):
        endless.accept(tokens[0])
    endless.close()
    again = apart.open("lark", "start: /a/")
    assert again.allows(tokens[0])
    again.close()


def test_memory_is_limited_where_the_system_sets_no_limit(
    apart: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """As on macOS: a thread of the process looks."""
    apart.allowance = replace(apart.allowance, seconds=20)
    program = processes.PROGRAM.read_text()
    limit = "        resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
    assert limit in program
    changed = tmp_path / "matching.py"
    changed.write_text(program.replace(limit, "        raise OSError\n"))
    monkeypatch.setattr(processes, "PROGRAM", changed)
    endings = []
    ending = processes._Process._ending

    def noted(process: Any, code: int, seconds: float) -> Any:
        endings.append(code)
        return ending(process, code, seconds)

    monkeypatch.setattr(processes._Process, "_ending", noted)
    with pytest.raises(GrammarError, match="64 MB of memory"):
        apart.open(*HOSTILE["optional characters"][:2])
    assert endings == [OUT_OF_MEMORY]


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has taken much is ended; of others, and of small grammars, few are kept."""
    tokenizer = fresh()
    processes_of(tokenizer)  # those of another tokenizer, which are kept no longer, end now
    gc.collect()
    ended = []
    end = processes._Process.end
    monkeypatch.setattr(
        processes._Process, "end", lambda process: ended.append(process.grown) or end(process)
    )
    monkeypatch.setattr(processes, "KEPT_BYTES", 1 << 22)
    for multiple in (9_973, 9_967, 7):
        structure = Structure.json_schema({"type": "integer", "multipleOf": multiple})
        open_grammar(structure, tokenizer, VOCAB).close()
        assert all(
            process.grown <= processes.KEPT_BYTES for process in processes_of(tokenizer)._idle
        )
    assert ended and min(ended) > processes.KEPT_BYTES
    held = [open_grammar(Structure.regex("[a-f]{9}"), tokenizer, VOCAB) for _ in range(3)]
    for each in held:
        each.close()
    assert len(processes_of(tokenizer)._idle) == processes.IDLE
    for number in range(20):
        keys = [f"{number}.{i}" for i in range(400)]
        small = Structure.json_schema({"enum": keys})
        open_grammar(small, tokenizer, VOCAB).close()
    kept = followers_of(tokenizer, VOCAB)._kept
    assert 1 < sum(len(text) for _, text in kept) <= followers.KEPT_CHARACTERS


def test_an_answer_that_nobody_closes_gives_its_process_back() -> None:
    tokenizer = fresh()
    open_grammar(Structure.regex("[a-f]+"), tokenizer, VOCAB)
    gc.collect()
    assert len(processes_of(tokenizer)._idle) == 1


def test_a_session_ends_its_processes_when_it_closes() -> None:
    sampling = Sampling(structure=Structure.regex("[a-f]+"))
    with Session.open(tiny_bundle(choose=True)) as session:
        session.tokenizer = fresh()
        session.compile(sampling)
        vocab = session.engine.geometry.vocab
        followers_here = followers_of(session.tokenizer, vocab)
        assert len(followers_here.processes._idle) == 1
        "".join(session.generate("n", max_tokens=3, sampling=sampling))
        assert len(followers_here.processes._idle) == 1
    assert not followers_here.processes._idle


def test_a_structure_is_compiled_once_for_several_answers() -> None:
    tokenizer = fresh()
    for _ in range(3):
        for pattern in ("[a-f]+", "[a-c]+"):
            open_grammar(Structure.regex(pattern), tokenizer, VOCAB).close()
    (process,) = processes_of(tokenizer)._idle
    assert len(process.known) == 2


def test_small_schemas_start_no_process() -> None:
    tokenizer = fresh()
    properties = {f"p{i}": {"type": "string", "maxLength": 9} for i in range(20)}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    structure = Structure.json_schema(schema)
    in_lark = Structure.lark(f'start: "n" call\ncall: %json {structure.source}')
    for each in (structure, in_lark):
        allowed = open_grammar(each, tokenizer, VOCAB).masked(np.zeros(VOCAB, np.float32))
        assert np.isfinite(allowed).any()
    assert not processes_of(tokenizer)._idle
    open_grammar(Structure.regex("a"), tokenizer, VOCAB).close()
    assert processes_of(tokenizer)._idle


NOT_SMALL: list[dict[str, Any]] = [
    {"type": "string", "pattern": "a"},
    {"allOf": [{"type": "string"}]},
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "maxItems": 10**9},
    {"type": "string", "format": "uri"},
    {"type": "string", "format": "date", "maxLength": 10},
    {"anyOf": [{"type": "string"}], "minLength": 3},
    {"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": {}}},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "object", "patternProperties": {"a": {}}},
    {"$ref": "#/description", "description": {"pattern": "a"}},
    {"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor", "pattern": "a"}}},
    {"type": "string", "x-guidance": {"whitespace_pattern": "(a|b)*"}},
    {"type": "number", "minimum": 1e-300},
    {"enum": ["a" * SMALL_CHARACTERS]},
    chain(LINKS["items"], 20),
]


@pytest.mark.parametrize("schema", NOT_SMALL, ids=range(len(NOT_SMALL)))
def test_what_may_grow_is_not_small(schema: dict[str, Any]) -> None:
    assert not Schema(schema).small


LARGEST_SMALL: dict[str, dict[str, Any]] = {
    "texts": {"enum": [f"{i:x}" for i in range(1200)]},
    "strings": {"anyOf": [{"type": "string", "maxLength": 5 * i} for i in range(180)]},
    "names": {"properties": {f"k{i}": {} for i in range(300)}, "type": "object"},
    "lists": {
        "anyOf": [
            {"type": "array", "maxItems": 1000 - i, "minItems": i, "items": {"type": "integer"}}
            for i in range(100)
        ]
    },
    "numbers": {
        "anyOf": [
            {"type": "number", "minimum": -(9.87654321**i), "maximum": 9.87654321**i}
            for i in range(1, 15)
        ]
        * 7
    },
    "formats": {"anyOf": [{"type": "string", "format": "date-time"}, {"format": "email"}] * 120},
}


@pytest.mark.parametrize("name", LARGEST_SMALL)
def test_small_schemas_take_little(name: str) -> None:
    """Also where they are as large as they may be: in a process with 24 MB."""
    schema = Schema(LARGEST_SMALL[name])
    assert schema.small
    tokenizer = letters()
    allowance = Allowance(seconds=20, memory=24 << 20)
    given = (tokenizer.tokenizer_json, VOCAB, list(tokenizer.stop_ids))
    grammar = Processes(*given, allowance=allowance).open("json", schema.written())
    draw = np.random.default_rng(0)
    for _ in range(100):
        bits = np.unpackbits(np.frombuffer(grammar.mask(), np.uint8), bitorder="little")[:VOCAB]
        bits[list(tokenizer.stop_ids)] = 0
        if not bits.any():
            break
        grammar.accept(int(draw.choice(np.flatnonzero(bits))))
    grammar.close()


def test_threads_compile_at_the_same_time() -> None:
    tokenizer = fresh()
    found: list[Grammar] = []

    def compile_one(number: int) -> None:
        grammar = open_grammar(Structure.regex(f"[a-f]{{{number}}}"), tokenizer, VOCAB)
        found.append(grammar)

    threads = [threading.Thread(target=compile_one, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for grammar in found:
        assert grammar.allows(letters().encode("a")[0])
        grammar.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
def test_a_child_that_forked_uses_processes_of_its_own() -> None:
    tokenizer = fresh()
    kept = open_grammar(Structure.regex("[a-f]+"), tokenizer, VOCAB)
    open_grammar(Structure.regex("[a-c]+"), tokenizer, VOCAB).close()
    child = os.fork()
    if child == 0:
        done = 1
        try:
            with pytest.raises(InputError, match="its answer has ended"):
                kept.allows(5)
            own = open_grammar(Structure.regex("[a-c]+"), tokenizer, VOCAB)
            done = 0 if own.allows(letters().encode("a")[0]) else 2
            own.close()
        finally:
            os._exit(done)
    assert os.waitpid(child, 0)[1] == 0
    assert kept.allows(letters().encode("a")[0])
    kept.close()


def test_an_app_without_an_interpreter_says_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = fresh()
    monkeypatch.setattr("sys.frozen", True, raising=False)
    with pytest.raises(InputError, match="use a small JSON schema without patterns"):
        open_grammar(Structure.regex("a"), tokenizer, VOCAB)
    open_grammar(Structure.json_schema({"type": "boolean"}), tokenizer, VOCAB).close()
