"""Measuring: what is counted, that modes are compared, and that a loaded machine is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssdevice.bench.machine import LOADED, Load, LoadWatch
from ssdevice.bench.runner import Acceptance, BenchOptions, BenchResult, Measured, measure
from ssdevice.data import Example
from ssdevice.errors import ConfigError, ContextOverflowError
from ssdevice.runtime.generation import Generation, accepted_path
from ssdevice.tree import Tree
from tests.commands.test_run import call
from tests.runtime import tiny_bundle as tiny
from tests.runtime.scripted import make_session

TREE = Tree.of([[0], [1], [0, 0], [1, 0]])


def silent(*_: object) -> None:
    """No progress."""


@pytest.mark.parametrize(
    ("drafts", "run", "path"),
    [
        ([[5, 6], [7, 8]], [9], ()),
        ([[5, 6], [7, 8]], [5, 9], (0,)),
        ([[5, 6], [7, 8]], [6, 7, 9], (1, 0)),
        ([[5, 6], [7, 8]], [6, 8], (1,)),  # candidate 1 of stream 2 is in no tree path
        ([[5, 5], [7, 8]], [5, 7, 1], (0, 0)),  # of equal candidates the first
        ([[5, 6], [7, 8]], [5, 7], (0, 0)),  # a run cut inside accepted drafts
    ],
)
def test_accepted_path(drafts: list[list[int]], run: list[int], path: tuple[int, ...]) -> None:
    assert accepted_path(TREE, drafts, run) == path


def test_acceptance_judges_drafts_by_the_answer() -> None:
    acceptance = Acceptance()
    # Token 10 is prefill's. Step 1 drafts 11 (rank 0), 12 (rank 1), and gives 11 and its own 12;
    # step 2 gives 13, 14.
    acceptance.add(
        [10, 11, 12, 13, 14],
        [([[11, 1], [2, 12]], 2), ([[3, 4], [14, 5]], 1), ([[14, 6], [7, 7]], 1)],
    )
    assert acceptance.histogram(3) == [2, 1, 0]
    assert acceptance.judged == {1: 3, 2: 2}
    assert acceptance.held == {(1, 0): 2, (2, 1): 1, (2, 0): 1}
    assert acceptance.table(2, 2) == [[2 / 3, 0.0], [0.5, 0.5]]


def examples(*prompts: str) -> list[Example]:
    return [Example(prompt, "x") for prompt in prompts]


def test_arms_run_the_same_prompts_and_agree() -> None:
    session = make_session(Tree.chain(3), oracle=1.0)
    result = measure(
        session, examples("one", "two", "three"), BenchOptions(rounds=2, max_tokens=17), silent
    )
    assert set(result.modes) == {"plain", "plain_step", "speculative", "adaptive"} and result.equal
    for mode in result.modes.values():
        assert [len(answers) for answers in mode.rounds] == [3, 3]
    speculative = result.modes["speculative"]
    counts = sum(sum(a.accepted) for a in speculative.answers)
    assert speculative.tokens_per_step == counts / sum(a.steps for a in speculative.answers)
    assert result.modes["plain"].tokens_per_step == 1
    # The first round is counted once, warm-up and later rounds are not.
    assert sum(result.acceptance.emitted.values()) == sum(a.steps for a in speculative.answers)
    assert result.acceptance.table(3, 1) == [[1.0], [1.0], [1.0]]
    assert (
        result.speedup is not None
        and result.baseline is not None
        and result.baseline.name != "speculative"
    )


def test_speeds_are_compared_by_token() -> None:
    result = measure(
        make_session(Tree.chain(2)), examples("one", "two", "three"), BenchOptions(rounds=2), silent
    )
    plain, speculative = (result.modes[name] for name in ("plain", "speculative"))
    for answers, seconds in ((plain.rounds, 1.0), (speculative.rounds, 0.5)):
        for answer in (answer for each in answers for answer in each):
            answer.decode_seconds = seconds * sum(answer.accepted)
    ratio = speculative.over(plain)
    assert ratio is not None and ratio.estimate == pytest.approx(2.0)
    for answer in speculative.rounds[0] + speculative.rounds[1]:
        answer.accepted = []
    assert speculative.over(plain) is None


def test_a_differing_arm_is_found() -> None:
    result = measure(
        make_session(Tree.chain(2)), examples("one", "two"), BenchOptions(rounds=2), silent
    )
    result.modes["speculative"].rounds[1][1].tokens[0] += 1
    assert (
        not result.equal
        and result.differing("speculative") == [1]
        and result.differing("plain_step") == []
    )


def test_prompts_beyond_the_context_are_an_error_or_left_out_and_counted() -> None:
    session = make_session(Tree.chain(2), context=30)
    prompts = examples("short", "x" * 60)
    with pytest.raises(ContextOverflowError, match="prompt 2: the prompt has .* --skip-long"):
        measure(session, prompts, BenchOptions(rounds=1), silent)
    result = measure(session, prompts, BenchOptions(rounds=1, skip_long=True), silent)
    assert result.skipped == 1 and [e.prompt for e in result.examples] == ["short"]


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError):
        BenchOptions(rounds=0)


def test_a_loaded_machine_is_not_valid() -> None:
    assert Load(LOADED, (0, 0, 0), (0, 0, 0)).valid
    assert not Load(LOADED + 0.01, (0, 0, 0), (0, 0, 0)).valid


def test_own_work_is_no_load() -> None:
    watch = LoadWatch()
    sum(range(10**5))
    assert 0 <= watch.load().others <= 1


def test_the_report_holds_what_design_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(json.dumps({"prompt": p, "completion": "a"}) for p in ("hello", "what now"))
        + "\n"
    )
    bundle = str(tiny.tiny_bundle("fp32").folder)
    report = tmp_path / "r.json"
    arguments = ["--rounds", "2", "--max-tokens", "8", "--threads", "1", "--json", str(report)]
    arguments += ["--report", str(tmp_path / "page")]
    assert call("bench", bundle, "--data", str(data), *arguments) == 0
    text = capsys.readouterr().out
    found = json.loads(report.read_text())
    assert (
        found["prompts"] == 2
        and found["threads"] == 1
        and found["equal"] is True
        and found["speedup"] > 0
    )
    assert set(found["arms"]) == {"plain", "plain_step", "speculative", "adaptive"}
    for mode in found["arms"].values():
        for key in (
            "tokens_per_second",
            "ttft_ms",
            "prefill_tokens_per_second",
            "host_us_per_step",
            "resident_mb",
        ):
            assert mode[key] > 0, key
        assert mode["peak_rss_mb"] >= mode["resident_mb"]
    histogram = found["arms"]["speculative"]["accepted_histogram"]
    assert (
        len(histogram) == tiny.TREE.emitted
        and sum(histogram) == found["arms"]["speculative"]["steps"]
    )
    assert found["quality"]["metric"] == "exact_match"
    assert found["valid"] is (found["machine"]["others_cpu_share"] <= LOADED)
    assert ("**Not valid:**" in text) is not found["valid"]
    assert "All decoding modes gave the same tokens" in text and "| speculative |" in text
    assert json.loads((tmp_path / "page" / "report.json").read_text()) == found
    assert f"ssdevice bench {bundle}" in (tmp_path / "page" / "index.html").read_text()


def test_a_profile_names_kernels_and_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "hello"}) + "\n")
    bundle = str(tiny.tiny_bundle("fp32").folder)
    assert (
        call(
            "bench", bundle, "--data", str(data), "--max-tokens", "4", "--threads", "1", "--profile"
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "step: kernels" in text and "host_us_per_step" in text and "FusedMatMul" in text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--metric", "bleu"], "argument --metric: invalid choice: 'bleu'"),
        (["--json", "/nowhere/at/all.json"], "its folder does not exist"),
        (["--report", __file__], "this is a file, expected a folder"),
        (["--rounds", "0"], "expected 1 or more"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    extra: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "hello"}) + "\n")
    assert call("bench", str(tmp_path), "--data", str(data), *extra) == 2
    assert message in capsys.readouterr().err


def test_a_result_without_plain_arms_has_no_speedup() -> None:
    result = measure(make_session(Tree.chain(2)), examples("one"), BenchOptions(rounds=1), silent)
    only = BenchResult(
        result.examples,
        {"speculative": result.modes["speculative"]},
        result.acceptance,
        result.load,
        0,
    )
    assert only.speedup is None and only.baseline is None and only.equal


def test_what_would_fail_after_the_measurement_fails_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "hello"}\n', "utf-8")
    assert (
        call(
            "bench",
            str(tiny.tiny_bundle("fp32").folder),
            "--data",
            str(data),
            "--metric",
            "exact_match",
        )
        == 2
    )
    assert "example 1" in capsys.readouterr().err


def test_where_answers_differ_speeds_are_compared_by_token() -> None:
    """As with typical acceptance: a mode that ends sooner is no faster for that."""

    def measured(name: str, answers: list[tuple[list[int], float]]) -> Measured:
        found = Measured(name)
        for tokens, seconds in answers:
            found.add(
                0,
                Generation(
                    3, tokens=tokens, accepted=[1] * (len(tokens) - 1), decode_seconds=seconds
                ),
            )
        return found

    def speedup(speculative: list[tuple[list[int], float]]) -> float:
        modes = [
            measured("plain", [([1, 2, 3], 2.0), ([1, 2, 3], 2.0)]),
            measured("speculative", speculative),
        ]
        result = BenchResult(
            [],
            {mode.name: mode for mode in modes},
            Acceptance(),
            Load(0.0, (0, 0, 0), (0, 0, 0)),
            0,
        )
        assert result.speedup is not None
        return result.speedup.estimate

    assert speedup([([1, 2, 3], 1.0), ([1, 2, 3], 1.0)]) == pytest.approx(2)
    assert speedup([([1, 4], 1.0), ([1, 4], 1.0)]) == pytest.approx(1)
