"""``research/own_trees.py`` and ``long_context.py``: trees of each method, their price, and
answers by context.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from research import composed, costs, long_context, own_trees, rivals
from research.tests.test_composed import CONFIG
from ssdevice.tree import Tree, tokens_per_step
from tests.runtime import tiny_bundle as tiny

METHODS = ("Medusa-1", "EAGLE", "streams")
RANKS = [
    [[rank, 2 + i] for i, rank in enumerate(ranks)]
    for ranks in ((0, 1, 1, 0, 1, 0, 1, 1), (1, 0, 0, 1, 1))
]


def test_a_level_is_drafted_after_each_node_that_has_children() -> None:
    assert own_trees.levels(Tree.chain(3)) == [1, 1, 1]
    assert own_trees.levels(Tree.of([[0], [1], [2], [0, 0], [0, 1], [2, 0], [2, 0, 0]])) == [
        1,
        2,
        1,
    ]


def test_the_products_of_our_draft_layers_are_nearly_all_of_its_operations() -> None:
    layers, heads = own_trees.draft_layers(sizes := composed.Sizes(CONFIG, 0))
    operations = sum(2 * rows * k * n for rows, k, n in [*layers, *heads])
    counted = costs.draft_layers(costs.Shape(CONFIG, 0))
    assert 0.98 <= operations / (counted.draft + sizes.verified * counted.row) <= 1


def test_a_wider_tree_has_more_rows_of_each_product_that_reads_a_draft() -> None:
    sizes = composed.Sizes(CONFIG, 0, gamma=2)
    sizes.drafted = [1, 3]
    for name in ("Hydra", "EAGLE", "MoA TLI 1"):
        chain = composed.DRAFTS[name](composed.Sizes(CONFIG, 0, gamma=2))
        wide = composed.DRAFTS[name](sizes)
        assert [rows for rows, _, _ in wide[1]] == [1, 3] and len(wide[0]) == len(chain[0])
        assert {after[0] - before[0] for before, after in zip(chain[0], wide[0], strict=True)} == {
            0,
            2,
        }
    for name in ("BPD", "Medusa-1"):
        assert composed.DRAFTS[name](sizes) == composed.DRAFTS[name](
            composed.Sizes(CONFIG, 0, gamma=2)
        )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """What a run of ``rivals.py`` leaves."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = {"gamma": 2, "draft_vocabulary": 16, "base": str(tmp_path), "dev_limit": 4}
    (tmp_path / "options.json").write_text(json.dumps(options))
    (tmp_path / "results.jsonl").write_text(
        "".join(json.dumps({"method": name}) + "\n" for name in METHODS)
    )
    for name in METHODS:
        folder = rivals.folder(Namespace(out=tmp_path), name)
        folder.mkdir()
        (folder / rivals.RANKS).write_text(json.dumps(RANKS * 2))
    return tmp_path


def test_half_of_the_answers_choose_and_the_other_half_is_counted(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_trees.chosen(RANKS, [2])[1] == Tree.of([[0], [1]])
    files = {"steps": 0}

    def timed(folders: list[Path], length: int, rounds: int) -> list[list[float]]:
        files["steps"] = len(folders)
        return [[1.0, 2.0]] * 2 + [[1.0, 2.5]] * 2  # without streams, then with

    monkeypatch.setattr(
        own_trees, "step_bundles", lambda args, base, trees, own: [out] * len([*trees, *own])
    )
    monkeypatch.setattr(own_trees, "timed", timed)
    monkeypatch.setattr(own_trees, "draft_ms", lambda drafts, few, rounds: [3.0] * len(drafts))
    own_trees.main([str(out), "--sizes", "2", "--bundles", str(out)])
    betas, speeds = [
        {
            cells[1].strip(): cells[2:4]
            for line in part.splitlines()
            if len(cells := line.split("|")) > 3
        }
        for part in capsys.readouterr().out.split("a plain call")
    ]
    beta = [tokens_per_step(RANKS, tree) for tree in (Tree.chain(2), Tree.of([[0], [1]]))]
    assert files["steps"] == 4 and beta[0] != beta[1]
    for name in METHODS:
        assert [float(cell) for cell in betas[name]] == pytest.approx(beta, abs=0.005)
        draft = 0.5 if name == "streams" else 3.0
        given = [float(cell.split(":")[1].replace(",", "")) for cell in speeds[name]]
        assert given == pytest.approx([1e3 * each / (2.0 + draft) for each in beta], abs=0.5)


def test_long_prompts_are_answered_alike_by_all_and_a_second_run_adds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"prompt": text} for text in ("abcabc", "bca", "hello", "cab")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    words = ["--model", str(tiny.base_folder()), "--adapter", str(tiny.adapter_folder())]
    words += [
        "--data",
        str(tmp_path / "prompts.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--quant",
        "fp32",
    ]
    words += ["--contexts", "12,24", "--prompts", "2", "--max-tokens", "10", "--tree", "chain:2"]
    long_context.main(words)
    first = capsys.readouterr().out
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 2 * 2 * 3 and all(len(row["rows"]) == len(row["ms"]) for row in rows)
    assert all(row["length"] <= row["context"] for row in rows)
    long_context.main(words)
    assert capsys.readouterr().out.endswith(first[first.index("| context") :])
