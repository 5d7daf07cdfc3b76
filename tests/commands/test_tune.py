"""Choosing a tree: observed ranks are those of the drafts, and simulation is what decoding does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.bench.equality import answer
from ssdevice.bench.tuning import Cost, choices, interpolate, observe
from ssdevice.config import Schedule
from ssdevice.errors import InputError
from ssdevice.ranks import tokens_per_step
from ssdevice.runtime.loop import speculative
from ssdevice.tree import Tree
from tests.commands.test_run import call
from tests.runtime import tiny_bundle as tiny
from tests.runtime.scripted import ScriptedCache, ScriptedEngine, cache_of, continuation, make_geometry

TREES = [Tree.chain(3), Tree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), Tree.full(2, 3)]


def drafter(cache: ScriptedCache, context: list[int]):  # type: ignore[no-untyped-def]
    """Drafts that depend on the context alone, so that every way to decode sees the same."""
    import numpy as np

    g = cache.geometry
    random = np.random.default_rng(sum(context) + len(context))
    truth = continuation(context, g.gamma + 1, g.vocab)[1:]
    drafts = random.integers(0, g.vocab, (g.gamma, g.k)).astype(np.int32)
    for stream, token in enumerate(truth):
        if random.random() < 0.7:
            drafts[stream, random.integers(g.k)] = token
    return drafts


@given(st.sampled_from(TREES), st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=6), min_size=1, max_size=3))
def test_simulation_is_what_decoding_does(tree: Tree, prompts: list[list[int]]) -> None:
    engine = ScriptedEngine(make_geometry(tree, k=2, context=80), drafter)  # type: ignore[arg-type]
    ranks = observe(engine, prompts, (), 30, lambda *_: None)
    emitted = steps = 0
    for prompt in prompts:
        conversation = engine.new_conversation()
        emitted += len(answer(conversation, prompt, speculative, (), 30)) - 1
        steps += cache_of(conversation).steps
    # A candidate that appears twice counts at its first rank, though the tree may hold only the second.
    assert tokens_per_step(ranks, tree) <= emitted / steps + 1e-9
    if tree.width == 1:
        single = [[[rank if rank == 0 else 9 for rank in row] for row in rows] for rows in ranks]
        assert tokens_per_step(single, tree) == pytest.approx(emitted / steps)


def test_costs_lie_on_lines_between_measured_sizes() -> None:
    costs = [Cost(1, 2.0), Cost(5, 4.0), Cost(9, 10.0)]
    assert [interpolate(costs, size) for size in (1, 3, 5, 7, 11)] == [2.0, 3.0, 4.0, 7.0, 13.0]


def test_the_fastest_tree_weighs_acceptance_against_cost() -> None:
    ranks = [[[0, 0, 0]] * 30]
    cheap = choices(ranks, range(2, 5), [Cost(1, 1.0), Cost(4, 1.1, Schedule.FUSED)])
    assert cheap[0].tree == Tree.chain(3)
    dear = choices(ranks, range(2, 5), [Cost(1, 1.0), Cost(2, 1.1, Schedule.FUSED), Cost(4, 9.0, Schedule.FUSED)])
    assert dear[0].tree == Tree.chain(1)


def test_each_size_runs_in_its_cheaper_schedule() -> None:
    costs = [Cost(1, 1.0), Cost(2, 1.5, Schedule.FUSED), Cost(4, 4.0, Schedule.FUSED), Cost(4, 2.8, Schedule.DEFERRED)]
    found = {choice.tree.size: choice.schedule for choice in choices([[[0, 0, 0]] * 30], range(2, 5), costs)}
    assert found == {2: Schedule.FUSED, 3: Schedule.DEFERRED, 4: Schedule.DEFERRED}


def test_drafts_that_are_never_right_are_an_error() -> None:
    with pytest.raises(InputError, match="no draft was ever right"):
        choices([[[1 << 20]] * 5], range(2, 5), [Cost(1, 1.0), Cost(4, 1.1, Schedule.FUSED)])


def test_tune_writes_a_tree_that_export_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "tree.json"
    data.write_text("\n".join(json.dumps({"prompt": p}) for p in ("hello", "what now", "b", "c", "d")) + "\n")
    arguments = ["--data", str(data), "--max-tokens", "60", "--threads", "1", "--out", str(out), "--json"]
    assert call("tune", str(tiny.tiny_bundle("fp32").folder), *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cost["nodes"] for cost in found["costs"]] == [1, tiny.TREE.size]
    assert Tree.parse(str(out)).to_json() == found["choices"][0]["tree"]


def test_tune_makes_its_own_trials_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": p}) for p in ("hello", "what now")) + "\n")
    model = ["--model", str(tiny.base_folder()), "--adapter", f"app={tiny.adapter_folder()}", "--quant", "fp32"]
    assert call("tune", *model, "--data", str(data), "--max-tokens", "60", "--threads", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    timed = {(cost["nodes"], cost["schedule"]) for cost in found["costs"]}
    assert {schedule for _, schedule in timed} == {None, "fused", "deferred"} and len(timed) == 5
    assert call("tune", *model[:2], "--data", str(data)) == 2
    assert call("tune", "--data", str(data)) == 2
