"""The promise with structures: answers have their form, and are the same in every decoding mode."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from ssdevice.cli import main
from ssdevice.errors import InputError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.generation import Reason
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE, decode, plain, speculative
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.sampling.structure import Structure, open_grammar
from ssdevice.runtime.session import Session
from ssdevice.text.stream import Emission
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.sampling.letters import letters
from tests.runtime.tiny_bundle import TREE, tiny_bundle

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "all": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "n", "all"],
    "additionalProperties": False,
}


def is_json(text: str) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(json.loads(text))


def is_sum(text: str) -> bool:
    return re.fullmatch(r"\{\{[0-9](\+[0-9]){0,7}=[0-9]\}\}", text) is not None


REGEX = "(ab|cd){5,9}: (red|green), name"
STRUCTURES: dict[str, tuple[Structure, Callable[[str], object]]] = {
    "schema": (Structure.json_schema(SCHEMA), is_json),
    "regex": (Structure.regex(REGEX), re.compile(REGEX).fullmatch),
    "lark": (
        Structure.lark('start: "{{" digit ("+" digit) ~ 0..7 "=" digit "}}"\ndigit: /[0-9]/'),
        is_sum,
    ),
}
SAMPLERS = (
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.2, logprobs=1),
    Sampling(temperature=1.0, top_k=20, logit_bias={7: 4.0}),
)


def with_letters(bundle: object) -> Session:
    opened = Session.open(bundle, threads=1)  # type: ignore[arg-type]
    opened.tokenizer = letters()
    return opened


@pytest.fixture(scope="module", params=["streams", "lookup"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    streams = request.param == "streams"
    with with_letters(
        tiny_bundle("int8", streams, repeats=0 if streams else 3, choose=True)
    ) as opened:
        yield opened


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_mode_gives_the_same_answer_in_its_form(session: Session, name: str) -> None:
    structure, has_form = STRUCTURES[name]
    ended = 0
    for seed, sampling in product(range(3), SAMPLERS):
        asked = Sampling(**{**vars(sampling), "seed": seed, "structure": structure})
        found = []
        for mode in ("plain", SPECULATIVE, ADAPTIVE):
            ids = session.prompt_ids(f"2 3 {seed}")
            steps = [
                len(run.tokens)
                for run in session.runs(ids, max_tokens=60, mode=mode, sampling=asked)
            ]
            found.append((session.last.tokens, session.last.text))
            if mode == SPECULATIVE:
                assert max(steps) > 1
        assert found[1:] == found[:1] * 2
        if session.last.reason is Reason.STOP:
            assert has_form(session.last.text), session.last.text
            ended += 1
    assert ended >= 9


@pytest.mark.parametrize("name", STRUCTURES)
def test_drafts_of_any_kind_change_nothing(session: Session, name: str) -> None:
    """Right drafts on one path after another, wrong ones, and forced tokens over both."""
    structure = STRUCTURES[name][0]
    vocab = session.engine.geometry.vocab
    counts = set()
    tree = session.engine.geometry.tree

    def answer(
        sampling: Sampling, plant: Callable[[Conversation, Sequence[int]], None] | None
    ) -> list[int]:
        conversation = session.engine.new_conversation()
        tokens = list[int]()
        grammar = open_grammar(structure, letters(), vocab)
        conversation.chosen_by(Chooser(sampling, prompt, letters().stop_ids, vocab, grammar))

        def accept(run: Sequence[int]) -> Emission:
            used = next(
                (i for i, token in enumerate(run, 1) if token in letters().stop_ids), len(run)
            )
            tokens.extend(run[:used])
            return Emission("", used, run[used - 1] in letters().stop_ids)

        def advance(held: Conversation, last: int) -> Sequence[int]:
            if plant is None:
                return plain(held, last)
            plant(held, tokens)
            return speculative(held, last)

        for run in decode(conversation, prompt, advance, accept, 60):
            counts.add(len(run.tokens))
        return tokens

    for seed in range(3):
        draw = np.random.default_rng(seed)
        prompt = draw.integers(4, vocab, 9).tolist()
        sampling = Sampling(temperature=1.0, seed=seed)
        truth = answer(sampling, None)

        def plant(held: Conversation, so_far: Sequence[int]) -> None:
            right = [*truth[len(so_far) :], 1, 1, 1]  # noqa: B023  called in this turn
            held.drafts[...] = draw.integers(0, vocab, held.drafts.shape)  # noqa: B023
            for depth, rank in enumerate(tree.paths[draw.integers(tree.size)]):  # noqa: B023
                held.drafts[depth, rank] = right[depth]

        assert answer(sampling, plant) == truth
    assert counts >= {1, 2, 3, 4}


def test_forced_tokens_are_drafts_that_are_all_accepted(session: Session) -> None:
    asked = Sampling(structure=Structure.regex("(red|green), (ab){6}"))
    for mode in (SPECULATIVE, ADAPTIVE):
        steps = [
            len(run.tokens)
            for run in session.runs([5, 6, 7], max_tokens=60, mode=mode, sampling=asked)
        ]
        text = session.last.text
        assert re.fullmatch("(red|green), (ab){6}", text) and session.last.reason is Reason.STOP
        # The first step chooses a colour's letter; what follows is certain, and so is the stop
        # token.
        assert mode == ADAPTIVE or steps == [
            1,
            *[4] * ((len(text)) // 4),
            *([len(text) % 4] * (len(text) % 4 > 0)),
        ]
    assert TREE.emitted == 4


def test_a_structure_and_processors_may_exclude_each_other(session: Session) -> None:
    """Nothing can be chosen then; the session lives on."""
    stuck = Sampling(structure=Structure.regex("a"), min_new_tokens=5)
    with pytest.raises(InputError, match="forbids every token"):
        list(session.generate("1", sampling=stuck))
    fine = Sampling(structure=Structure.regex("a"))
    assert list(session.generate("1", sampling=fine)) == ["a"]
    with pytest.raises(InputError, match="cannot be used"):
        session.generate("1", sampling=Sampling(structure=Structure.regex("[")))
    assert list(session.generate("1", sampling=fine)) == ["a"]


def test_a_greedy_bundle_refuses_a_structure() -> None:
    with with_letters(tiny_bundle()) as opened, pytest.raises(InputError, match="--choose host"):
        opened.generate("1", sampling=Sampling(structure=Structure.json_object()))


def test_run_takes_structures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny_bundle("int8", choose=True)
    monkeypatch.setattr(ChatTokenizer, "from_bytes", lambda *_: letters())
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "sum.lark").write_text(STRUCTURES["lark"][0].source)
    asked = [
        "run",
        str(bundle.folder),
        "--prompt",
        "1 2",
        "--max-tokens",
        "80",
        "--threads",
        "1",
        "--json",
    ]
    for option, has_form in (
        (["--json-schema", str(tmp_path / "schema.json")], is_json),
        (["--grammar", str(tmp_path / "sum.lark")], is_sum),
        (["--regex", REGEX], re.compile(REGEX).fullmatch),
    ):
        found = []
        for more in ([], ["--no-speculate"]):
            assert main([*asked, *option, "--temperature", "0.7", *more]) == 0
            found.append(json.loads(capsys.readouterr().out))
        assert (
            found[0]["tokens"] == found[1]["tokens"]
            and found[0]["reason"] == "stop"
            and has_form(found[0]["text"])
        )
        assert found[0]["steps"] < found[1]["steps"]
    assert main([*asked, "--json-object"]) == 0 and capsys.readouterr().out.find('"text": "{') > 0
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes").write_bytes(b"\xff")
    wrong = {
        "--json-schema": ("nowhere", "list.json", "bytes", "sum.lark", "."),
        "--grammar": ("nowhere", "bytes", "schema.json", "."),
    }
    for option, files in wrong.items():
        for file in files:
            assert main([*asked, option, str(tmp_path / file)]) == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and (file == "schema.json" or str(tmp_path / file) in said)
    for options in (["--regex", ""], ["--regex", "["], ["--regex", "a", "--json-object"]):
        assert main([*asked, *options]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_bench_measures_structures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny_bundle("int8", choose=True)
    data = tmp_path / "data.jsonl"
    report = tmp_path / "report.json"
    monkeypatch.setattr(ChatTokenizer, "from_bytes", lambda *_: letters())
    data.write_text('{"prompt": "1 2"}\n{"prompt": "3"}\n')
    asked = [
        "bench",
        str(bundle.folder),
        "--data",
        str(data),
        "--max-tokens",
        "20",
        "--threads",
        "1",
    ]
    assert main([*asked, "--regex", "(ab|cd){3}", "--json", str(report), "--rounds", "1"]) == 0
    found = json.loads(report.read_text())
    assert found["equal"] and found["sampling"] == {
        "structure": {"kind": "regex", "source": "(ab|cd){3}"}
    }
    assert (
        main([*asked, "--regex", "a", "--profile"]) == 2
        and "--regex has no effect" in capsys.readouterr().err
    )
