"""Engines beside each other: what is measured with peers that need no package, what is skipped,
what is written.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ssdevice.bench.machine import LoadWatch
from ssdevice.bench.runner import BenchOptions, take_turns
from ssdevice.cli import main
from ssdevice.errors import SSDeviceError
from ssdevice.peers import genai, hf, llamacpp, ours
from ssdevice.peers.arm import PEERS, Answer, Arm, Setup, Skip, UnavailableError
from ssdevice.peers.compare import as_json, as_markdown, compare, offers
from ssdevice.peers.ours import DraftModel
from ssdevice.peers.remote import Worker
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.loop import decode
from ssdevice.text.stream import Emission
from ssdevice.tree import Tree
from tests.runtime import tiny_bundle as tiny
from tests.runtime.scripted import ScriptedEngine, continuation, make_geometry, random_drafter

FAKE = '''
import os, time

class Counting:
    """Counts up from the prompt's last token, ``by`` tokens a call.

    ``wrong``: the place of one that is not right.
    """

    version, weights = "fake 1", "int1"

    def __init__(self, by, wrong):
        self.by, self.wrong = by, wrong

    def answer(self, prompt, answer):
        print("noise on standard output")
        os.write(1, b"and more\\n")
        assert prompt != [13], "no thirteen"
        if prompt == [99]:
            os.write(2, b"it broke\\n")
            os._exit(3)
        last, call = prompt[-1], 0
        while not answer.ended:
            time.sleep(0.001)
            run = [last + 1 + i for i in range(self.by if call else 1)]
            last, call = run[-1], call + 1
            answer.add([token + (token == self.wrong) for token in run])

def open_engine(settings):
    if settings.get("needs"):
        __import__(settings["needs"])
    assert not settings.get("fails"), "this model is unknown"
    return Counting(settings.get("by", 1), settings.get("wrong"))
'''


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fake_peer.py").write_text(FAKE)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    return "fake_peer"


def silent(*_: object) -> None:
    """No progress."""


def arm(
    module: str, name: str, plain: str | None = None, ours: bool = False, **settings: Any
) -> Arm:
    return Arm(name, module, {"stops": [0], **settings}, 1_500_000, plain, ours=ours)


def setup_of(folder: Path, **more: Any) -> Setup:
    values = {
        "gguf": folder / "model.gguf",
        "genai": None,
        "threads": 1,
        "context": 96,
        "stops": (0,),
        "lookup": (2, 4),
    }
    return Setup(model=folder, **{**values, **more})


def test_an_answer_ends_at_a_stop_or_at_its_length() -> None:
    answer = Answer(5, {7})
    assert not answer.add([1]) and not answer.add([2, 3]) and not answer.add([4], same_call=True)
    assert answer.add([7, 8]) and answer.add([9])
    assert (answer.tokens, answer.calls) == ([1, 2, 3, 4, 7], [1, 3, 1])
    found = answer.as_json()
    assert (
        found["accepted"] == [3, 1]
        and found["prefill_seconds"] >= 0
        and found["decode_seconds"] >= 0
    )
    longest = Answer(2, {7})
    assert longest.add([1, 2, 3]) and longest.tokens == [1, 2]


def test_every_lane_runs_a_prompt_before_the_next_and_another_goes_first() -> None:
    seen: list[tuple[object, ...]] = []
    turns = list(take_turns(2, 2, 3, lambda *what: seen.append(what)))
    assert turns[:6] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 1), (0, 1, 2), (0, 1, 0)]
    assert turns[6:9] == [(1, 0, 1), (1, 0, 2), (1, 0, 0)] and len(turns) == 12
    assert [what[1:3] for what in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_comparison_runs_all_arms_and_tells_which_differ_from_their_plain_answer(
    fake: str, tmp_path: Path
) -> None:
    arms = [
        arm(fake, "mine, plain", ours=True),
        arm(fake, "mine, speculative", "mine, plain", ours=True, by=3),
        arm(fake, "other, plain"),
        arm(fake, "other, lookup", "other, plain", by=2, wrong=24),
        arm(fake, "third, plain", needs="no_such_package"),
        arm(fake, "fourth, plain", fails=True),
        Skip("fifth", "its file is not there"),
    ]
    found = compare(arms, [[1, 10], [2, 20]], BenchOptions(rounds=2, max_tokens=8), silent)
    rows = {row.arm.name: row for row in found.rows}
    assert list(rows) == ["mine, plain", "mine, speculative", "other, plain", "other, lookup"]
    assert rows["other, plain"].measured.answers[0].tokens == list(range(11, 19))
    assert {name: row.measured.tokens_per_step for name, row in rows.items()} == {
        "mine, plain": 1,
        "mine, speculative": 7 / 3,
        "other, plain": 1,
        "other, lookup": 14 / 8,
    }
    assert {name: found.differing(row) for name, row in rows.items()} == {
        "mine, plain": None,
        "mine, speculative": [],
        "other, plain": None,
        "other, lookup": [1],
    }
    assert all(
        len(row.measured.rounds) == 2 and row.resident_mb > 1 and row.peak_mb > 1
        for row in found.rows
    )
    assert found.baseline.arm.name == "other, plain"
    reasons = {skip.name: skip.reason for skip in found.skipped}
    assert set(reasons) == {"third, plain", "fourth, plain", "fifth"}
    assert "no_such_package is not installed" in reasons["third, plain"]
    assert "this model is unknown" in reasons["fourth, plain"]

    report = as_json(
        found, setup_of(tmp_path), BenchOptions(rounds=2, max_tokens=8), "d.jsonl", 1, ["take note"]
    )
    report = json.loads(json.dumps(report))
    assert (
        report["prompts"] == 2
        and report["skipped"] == reasons
        and report["baseline"] == "other, plain"
    )
    row = report["arms"]["mine, speculative"]
    assert (
        row["equal_to_plain"] is True
        and row["disk_mb"] == 1.5
        and row["over_baseline"]["estimate"] > 0
    )
    assert report["arms"]["other, lookup"]["equal_to_plain"] is False
    assert report["arms"]["other, plain"]["equal_to_plain"] is None
    text = as_markdown(report)
    assert "| other, lookup | int1 |" in text and "| 1 of 2 |" in text and "| 2 of 2 |" in text
    assert (
        "- skipped: fifth: its file is not there" in text
        and "- take note" in text
        and "(1 longer ones" in text
    )
    assert "- mine, speculative: " in text and "as fast by token as other, plain" in text
    assert ("**Not valid:**" in text) is not report["valid"]
    assert "**Not valid:**" in as_markdown(report | {"valid": False})


def test_without_a_peer_there_is_nothing_to_be_faster_than(fake: str) -> None:
    found = compare(
        [arm(fake, "mine, plain", ours=True)], [[1]], BenchOptions(rounds=1, max_tokens=3), silent
    )
    assert found.baseline is found.rows[0] and found.over_baseline(found.rows[0]) is None


def test_bundles_are_compared_with_the_first_where_there_is_no_peer(
    fake: str, tmp_path: Path
) -> None:
    arms = [
        arm(fake, "one, plain", ours=True),
        arm(fake, "one, speculative", "one, plain", ours=True, by=3),
        arm(fake, "two, plain", ours=True, wrong=24),
    ]
    options = BenchOptions(rounds=2, max_tokens=8)
    report = as_json(
        compare(arms, [[10], [20]], options, silent), setup_of(tmp_path), options, "d.jsonl", 0, []
    )
    assert (
        report["baseline"] == "one, plain" and report["arms"]["one, plain"]["over_baseline"] is None
    )
    text = as_markdown(report)
    assert "- two, plain: the tokens of one, plain on 1 of 2 prompts" in text
    assert "- one, speculative: " in text and "as fast by token as one, plain" in text


def test_a_bundle_that_cannot_be_opened_is_no_skip(fake: str) -> None:
    with pytest.raises(UnavailableError, match="mine: AssertionError: this model is unknown"):
        compare([arm(fake, "mine", ours=True, fails=True)], [[1]], BenchOptions(rounds=1), silent)


def test_a_worker_that_fails_or_dies_is_an_error_that_says_why(fake: str) -> None:
    with Worker(arm(fake, "one")) as worker:
        assert worker.answer([4], 2).tokens == [5, 6]
        with pytest.raises(SSDeviceError, match="one: AssertionError: no thirteen"):
            worker.answer([13], 2)
        with pytest.raises(SSDeviceError, match="one: its process ended with code 0"):
            worker.answer([4], 2)
    with (
        Worker(arm(fake, "two")) as worker,
        pytest.raises(SSDeviceError, match="ended with code 3: it broke"),
    ):
        worker.answer([99], 2)
    with pytest.raises(UnavailableError, match="cannot be started"):
        Worker(Arm("three", fake, {}, 0, python="/no/such/python"))


def test_what_workers_do_is_no_load_of_others(fake: str) -> None:
    with Worker(arm(fake, "one")) as worker:
        watch = LoadWatch([worker.pid])
        worker.answer([4], 20)
        assert 0 <= watch.load().others <= 1


def test_peers_offer_plain_and_lookup_arms_for_the_files_that_are_there(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    setup = setup_of(model, pythons={"llama.cpp": "/other/python"})
    nothing = offers(setup, ["transformers"], silent)
    assert {found.name for found in nothing if isinstance(found, Skip)} == {
        "llama.cpp",
        "genai int4, plain",
        "genai int8, plain",
        "transformers",
    } and len(nothing) == 4
    (model / "model.gguf").write_bytes(b"x" * 100)
    (model / "model.safetensors").write_bytes(b"x" * 40)
    built = tmp_path / "built" / "model-int4"
    built.mkdir(parents=True)
    (built / "genai_config.json").write_text("{}")
    setup = setup_of(
        model,
        pythons={"llama.cpp": "/other/python", "genai": "/no/such/python"},
        genai=built.parent,
    )
    found = offers(setup, [], silent)
    arms = {one.name: one for one in found if isinstance(one, Arm)}
    assert {name: one.plain for name, one in arms.items()} == {
        "llama.cpp, plain": None,
        "llama.cpp, prompt lookup of 2": "llama.cpp, plain",
        "llama.cpp, prompt lookup of 4": "llama.cpp, plain",
        "genai int4, plain": None,
        "transformers, plain": None,
        "transformers, prompt lookup of 2": "transformers, plain",
        "transformers, prompt lookup of 4": "transformers, plain",
    }
    assert [skip.name for skip in found if isinstance(skip, Skip)] == [
        "genai int8, plain"
    ]  # it would be built
    assert (
        arms["llama.cpp, plain"].python == "/other/python"
        and arms["transformers, plain"].python == sys.executable
    )
    assert (arms["llama.cpp, plain"].disk_bytes, arms["transformers, plain"].disk_bytes) == (
        100,
        40,
    )
    assert arms["genai int4, plain"].settings == {
        "threads": 1,
        "context": 96,
        "stops": [0],
        "sampling": {},
        "folder": str(built),
        "precision": "int4",
    }
    assert {llamacpp.NAME, genai.NAME, hf.NAME} == set(PEERS)


def test_the_builder_leaves_a_whole_folder_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        'mkdir "$2" && echo {} > "$2/genai_config.json"\n'
    )
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    genai.build(str(script), tmp_path, Path("kept") / "m-int8", "int8")
    assert [file.name for file in (tmp_path / "kept").rglob("*")] == ["m-int8", "genai_config.json"]
    script.write_text("#!/bin/sh\necho one >&2; echo No module named torch >&2; exit 1\n")
    with pytest.raises(UnavailableError, match="its builder failed: No module named torch"):
        genai.build(str(script), tmp_path, tmp_path / "kept" / "m-int4", "int4")
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_an_app_with_streams_is_measured_both_ways(tmp_path: Path) -> None:
    bundle = tiny.tiny_bundle("fp32")
    arms = list(
        ours.offers(bundle, None, EngineOptions(spinning=False), setup_of(tmp_path), "mine")
    )
    assert [(one.name, one.plain) for one in arms if isinstance(one, Arm)] == [
        ("mine, plain", None),
        ("mine, speculative", "mine, plain"),
        ("mine, adaptive", "mine, plain"),
    ]
    plain = list(
        ours.offers(
            tiny.tiny_bundle("fp32", streams=False),
            None,
            EngineOptions(),
            setup_of(tmp_path),
            "base",
        )
    )
    assert [one.name for one in plain if isinstance(one, Arm)] == ["base, plain"]


def test_the_command_measures_a_bundle_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    report = tmp_path / "report.json"
    data.write_text("\n".join(json.dumps({"prompt": text}) for text in ("hello", "x" * 90)) + "\n")
    bundle = str(tiny.tiny_bundle("fp32").folder)
    model = str(tiny.base_folder())
    options = [
        "--rounds",
        "1",
        "--max-tokens",
        "8",
        "--threads",
        "1",
        "--without",
        "transformers",
        "--quiet",
    ]
    command = [
        "peers",
        bundle,
        "--data",
        str(data),
        "--model",
        model,
        "--json",
        str(report),
        *options,
    ]
    assert main(command) == 2 and "--skip-long leaves out" in capsys.readouterr().err
    assert main([*command, "--skip-long"]) == 0
    text = capsys.readouterr().out
    found = json.loads(report.read_text())
    name = f"ssdevice {Path(bundle).name}"
    assert set(found["arms"]) == {f"{name}, plain", f"{name}, speculative", f"{name}, adaptive"}
    for row in found["arms"].values():
        assert (
            row["tokens_per_second"] > 0
            and row["ttft_ms"] > 0
            and row["resident_mb"] > 10
            and row["disk_mb"] > 0
        )
        assert row["weights"] == "fp32"
    assert found["arms"][f"{name}, speculative"]["equal_to_plain"] is True
    assert (found["prompts"], found["skipped_prompts"], found["threads"], found["context"]) == (
        1,
        1,
        1,
        tiny.CONTEXT,
    )
    assert set(found["skipped"]) == {
        "llama.cpp",
        "genai int4, plain",
        "genai int8, plain",
        "transformers",
    }
    assert "- skipped: genai int4, plain; genai int8, plain: --genai names" in text
    assert "- skipped: llama.cpp: " in text and "an adapter that changes the answers" in text


@pytest.mark.parametrize("peer", ["none", pytest.param("transformers", marks=pytest.mark.slow)])
def test_engines_sample_alike(
    peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    report = tmp_path / "report.json"
    data.write_text("\n".join(json.dumps({"prompt": text}) for text in ("hello", "go on")) + "\n")
    bundle = str(tiny.tiny_bundle("fp32", choose=True).folder)
    model = str(tiny.base_folder())
    options = [
        "--rounds",
        "1",
        "--max-tokens",
        "12",
        "--threads",
        "1",
        "--quiet",
        "--json",
        str(report),
    ]
    asked = ["--temperature", "1.5", "--top-k", "50", "--seed", "3"]
    asked += [] if peer == "transformers" else ["--without", "transformers"]
    assert main(["peers", bundle, "--data", str(data), "--model", model, *options, *asked]) == 0
    found = json.loads(report.read_text())
    assert found["sampling"] == {"temperature": 1.5, "top_k": 50, "seed": 3}
    assert "temperature 1.5, top-k 50, seed 3" in capsys.readouterr().out
    equal = {name: arm["equal_to_plain"] for name, arm in found["arms"].items() if arm["plain"]}
    ours = f"ssdevice {Path(bundle).name}"
    assert equal[f"{ours}, speculative"] is True and equal[f"{ours}, adaptive"] is True
    assert ("transformers, plain" in found["arms"]) == (peer == "transformers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "3"], "--seed has no effect: without --temperature"),
        (["--temperature", "1", "--min-p", "0.1"], "unrecognized arguments: --min-p"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (
            ["--temperature", "1", "--draft-model", "d"],
            "--temperature has no effect: a model that drafts",
        ),
        (["--without", "llama"], "no peer 'llama'; there are llama.cpp, genai, transformers"),
        (["--python", "genai"], "expected PEER=FILE"),
        (["--python", "gen=/x"], "no peer 'gen'"),
        (["--model", "/no/such/model"], "no such folder"),
    ],
)
def test_options_are_checked(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "hello"}) + "\n")
    bundle = str(tiny.tiny_bundle("fp32").folder)
    model = str(tiny.base_folder())
    assert main(["peers", bundle, "--data", str(data), "--model", model, *options]) == 2
    assert message in capsys.readouterr().err


def test_other_weights_than_the_bundles_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "hello"}) + "\n")
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert (
        main(
            [
                "peers",
                str(tiny.tiny_bundle("fp32").folder),
                "--data",
                str(data),
                "--model",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert "is not the base of" in capsys.readouterr().err


@pytest.mark.parametrize("right", [True, False])
def test_a_smaller_model_drafts_what_it_would_say(right: bool) -> None:
    """Both models are the same, but the smaller one may get the last token of every call wrong."""
    engine = ScriptedEngine(
        make_geometry(Tree.chain(3), vocab=50, context=80), random_drafter(0, 0.0)
    )
    drafter = DraftModel(engine.new_conversation())
    if not right:
        read = drafter.small.step_plain
        drafter.small.step_plain = lambda last: (read(last) + 1) % 50  # type: ignore[method-assign]
    for prompt in ([1, 2, 3], [1, 2, 3, 4, 5, 6, 0, 3, 2, 1]):
        conversation = engine.new_conversation()
        answer = list(
            decode(conversation, prompt, drafter, lambda run: Emission("", len(run), False), 40)
        )
        assert [token for run in answer for token in run.tokens] == continuation(prompt, 40, 50)
        assert set(len(run.tokens) for run in answer[2:-1]) == ({4} if right else {1})
