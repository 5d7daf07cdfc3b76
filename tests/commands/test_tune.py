"""Choosing a tree: observed ranks are those of the drafts, and simulation is what decoding does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.bench.modes import answer
from ssdevice.bench.tuning import CostTable, StepCost, choices, observe
from ssdevice.commands.tune import WIDTH, _tree
from ssdevice.config import Schedule, to_json
from ssdevice.errors import ConfigError, InputError
from ssdevice.runtime.loop import speculative
from ssdevice.tree import Tree, tokens_per_step
from tests.commands.test_run import call
from tests.runtime import tiny_bundle as tiny
from tests.runtime.scripted import (
    ScriptedCache,
    ScriptedEngine,
    cache_of,
    continuation,
    make_geometry,
)

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


def first_only(ranks: list[int]) -> list[int]:
    """Ranks of which only the first can be accepted."""
    return [rank if rank == 0 else 9 for rank in ranks]


@given(
    st.sampled_from(TREES),
    st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_simulation_is_what_decoding_does(tree: Tree, prompts: list[list[int]]) -> None:
    engine = ScriptedEngine(make_geometry(tree, k=2, context=80), drafter)  # type: ignore[arg-type]
    ranks = observe(engine, prompts, (), 30, lambda *_: None)
    emitted = steps = 0
    for prompt in prompts:
        conversation = engine.new_conversation()
        emitted += len(answer(conversation, prompt, speculative, (), 30)) - 1
        steps += cache_of(conversation).steps
    # A candidate that appears twice counts at its first rank, though the tree may hold only the
    # second.
    assert tokens_per_step(ranks, tree) <= emitted / steps + 1e-9
    if tree.width == 1:
        single = [list(map(first_only, rows)) for rows in ranks]
        assert tokens_per_step(single, tree) == pytest.approx(emitted / steps)


ALWAYS = [[[0, 0, 0]] * 30]
FUSED = Schedule.FUSED
DEFERRED = Schedule.DEFERRED


def table(*steps: StepCost, plain_ms: float | None = 1.0) -> CostTable:
    """A synthetic device: a phone that runs INT4 bundles for Core ML."""
    manifest = tiny.tiny_bundle("fp32").manifest
    return CostTable(
        device="phone",
        instructions=("asimddp",),
        target="coreml",
        precision="int4",
        threads=2,
        kernels=False,
        model=manifest.model.sha256,
        gamma=manifest.geometry.gamma,
        msa_layers=manifest.msa_layers,
        steps=steps,
        plain_ms=plain_ms,
    )


def test_a_cliff_behind_four_rows_chooses_a_tree_of_four() -> None:
    # Kernels work on tiles of four rows, so the fifth is dear, though all drafts are right.
    ranks = [[[0, 0, 0, 0]] * 31]
    cliff = [StepCost(n, FUSED, ms) for n, ms in ((2, 1.0), (3, 1.05), (4, 1.1), (5, 2.0))]
    assert choices(ranks, cliff)[0].tree == Tree.chain(3)
    flat = [StepCost(n, FUSED, ms) for n, ms in ((2, 1.0), (3, 1.05), (4, 1.1), (5, 1.11))]
    assert choices(ranks, flat)[0].tree == Tree.chain(4)


def test_only_measured_sizes_are_chosen() -> None:
    found = choices(ALWAYS, [StepCost(2, FUSED, 1.0), StepCost(4, FUSED, 1.1)])
    assert [choice.tree.size for choice in found] == [4, 2]
    with pytest.raises(
        InputError, match="the drafts fill a tree of 4 nodes, and only steps of 5, 8 nodes"
    ):
        choices(ALWAYS, [StepCost(5, FUSED, 1.0), StepCost(8, FUSED, 1.0)])


def test_speed_is_predicted_from_tokens_and_milliseconds() -> None:
    chosen = choices(ALWAYS, [StepCost(4, FUSED, 2.0)])[0]
    assert chosen.tokens_per_second == chosen.tokens_per_step / 2.0 * 1e3
    dear = choices(ALWAYS, [StepCost(2, FUSED, 1.1), StepCost(4, FUSED, 9.0)])
    assert dear[0].tree == Tree.chain(1)


def test_each_size_runs_in_its_cheaper_schedule() -> None:
    costs = [StepCost(2, FUSED, 1.5), StepCost(4, FUSED, 4.0), StepCost(4, DEFERRED, 2.8)]
    assert {c.tree.size: c.cost.schedule for c in choices(ALWAYS, costs)} == {2: FUSED, 4: DEFERRED}


def test_drafts_that_are_never_right_are_an_error() -> None:
    with pytest.raises(InputError, match="no draft was ever right"):
        choices([[[1 << 20]] * 5], [StepCost(4, FUSED, 1.1)])


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = table(StepCost(3, FUSED, 1.25), StepCost(3, DEFERRED, 1.0))
    written.write(tmp_path / "t.json")
    assert CostTable.read(tmp_path / "t.json") == written


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"plain_ms": 0}, "plain_ms is 0.0, expected above 0"),
        ({"steps": []}, "steps: none"),
        ({"steps": [{"nodes": 1, "schedule": "fused", "ms": 1}]}, "nodes is 1, expected 2 to "),
        ({"steps": [{"nodes": 4, "schedule": "fused", "ms": 1}] * 2}, "a size appears twice"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_a_broken_table_is_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    table(StepCost(3, FUSED, 1.25)).write(tmp_path / "t.json")
    (tmp_path / "t.json").write_text(
        json.dumps(json.loads((tmp_path / "t.json").read_text()) | change)
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        CostTable.read(tmp_path / "t.json")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16])
def test_trial_trees_have_the_sizes_asked_for(size: int) -> None:
    tree = _tree(3, size)
    assert tree.size == size and tree.depth == min(size - 1, 3) and tree.width <= WIDTH


def test_costs_of_a_phone_choose_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    costs = tmp_path / "phone.json"
    bundle = str(tiny.tiny_bundle("fp32").folder)
    data.write_text(
        "\n".join(json.dumps({"prompt": p}) for p in ("hello", "what now", "b", "c", "d")) + "\n"
    )
    table(StepCost(2, FUSED, 4.0), StepCost(3, FUSED, 40.0)).write(costs)
    arguments = [
        "--data",
        str(data),
        "--max-tokens",
        "60",
        "--threads",
        "1",
        "--cost-table",
        str(costs),
    ]
    assert call("tune", bundle, *arguments) == 0
    text = capsys.readouterr().out
    assert all(
        word in text
        for word in ("phone", "asimddp", "int4", "coreml", "predicted_tokens_per_second")
    )
    assert "no tree is faster than plain decoding" in text
    assert call("tune", bundle, *arguments, "--write-cost-table", str(tmp_path / "t.json")) == 2
    replace(table(StepCost(2, FUSED, 4.0)), gamma=2).write(costs)
    assert call("tune", bundle, *arguments) == 2
    assert "phone.json: its γ is 2, that of the bundle is 3" in capsys.readouterr().err


def test_tune_writes_a_tree_that_export_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    out = tmp_path / "tree.json"
    data.write_text(
        "\n".join(json.dumps({"prompt": p}) for p in ("hello", "what now", "b", "c", "d")) + "\n"
    )
    arguments = [
        "--data",
        str(data),
        "--max-tokens",
        "60",
        "--threads",
        "1",
        "--out",
        str(out),
        "--json",
    ]
    arguments += ["--write-cost-table", str(tmp_path / "costs.json")]
    assert call("tune", str(tiny.tiny_bundle("fp32").folder), *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cost["nodes"] for cost in found["costs"]["steps"]] == [tiny.TREE.size]
    costs = CostTable.read(tmp_path / "costs.json")
    assert to_json(costs) == found["costs"] and costs.plain_ms is not None
    assert Tree.parse(str(out)).to_json() == found["choices"][0]["tree"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("token_rank", "schedules"), [(0, ("fused", "deferred")), (4, ("deferred",))]
)
def test_tune_makes_its_own_trials_of_a_model(
    token_rank: int, schedules: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each schedule that the streams allow; those of the default recipe see the chosen token, so
    they wait.
    """
    from transformers.utils import logging

    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": p}) for p in ("hello", "what now")) + "\n")
    adapter = f"app={tiny.adapter_folder(token_rank)}"
    model = ["--model", str(tiny.base_folder()), "--adapter", adapter, "--quant", "fp32"]
    asked = [
        "--data",
        str(data),
        "--max-tokens",
        "60",
        "--threads",
        "1",
        "--json",
        "--sizes",
        "2,4",
        "--quiet",
    ]
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    capsys.readouterr()  # of making the adapter
    assert call("tune", *model, *asked) == 0
    said = capsys.readouterr()
    assert "Loading weights" not in said.err
    found = json.loads(said.out)
    timed = {(cost["nodes"], cost["schedule"]) for cost in found["costs"]["steps"]}
    assert timed == {(nodes, schedule) for nodes in (2, 4) for schedule in schedules}
    assert {choice["nodes"] for choice in found["choices"]} <= {2, 4}
    assert call("tune", *model[:2], "--data", str(data)) == 2
    assert call("tune", "--data", str(data)) == 2
    assert (
        call("tune", str(tiny.tiny_bundle("fp32").folder), "--data", str(data), "--sizes", "3") == 2
    )


def test_costs_of_another_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tiny.tiny_bundle("fp32")
    other = tiny.bundle_of_another_base(tmp_path / "other")
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "hello"}\n', "utf-8")
    assert call("tune", str(mine.folder), "--data", str(data), "--cost-of", str(other)) == 2
    assert "its base model is 0000" in capsys.readouterr().err
