"""``research/composed.py``: the products of each draft are those that ``costs.py`` counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research import composed, costs
from ssdevice.runtime.onnx import kernels
from tests.compiled_kernels import COMPILER, NO_COMPILER, built
from tests.runtime.tiny_bundle import base_folder, tiny_bundle

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "vocab_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize("name", [name for name in composed.DRAFTS if name in costs.METHODS])
def test_products_are_nearly_all_operations_of_a_draft(name: str) -> None:
    layers, heads = composed.DRAFTS[name](sizes := composed.Sizes(CONFIG, 0))
    operations = sum(2 * rows * k * n for rows, k, n in [*layers, *heads])
    counted = costs.METHODS[name](costs.Shape(CONFIG, 0))
    assert (
        0.98 <= operations / (counted.draft + sizes.verified * counted.row) <= 1
    )  # attention's sums are left out


@pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
def test_the_table_has_a_row_for_each_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "library", lambda: built("native"))
    (tmp_path / "results").write_text(json.dumps({"method": "EAGLE", "beta": [1.5, 2.5]}) + "\n")
    bundle = str(tiny_bundle("int8", streams=False, repeats=3).folder)
    composed.main(
        [
            str(base_folder()),
            str(tmp_path / "results"),
            bundle,
            bundle,
            "--length",
            "20",
            "--rounds",
            "4",
        ]
    )
    said = capsys.readouterr().out
    assert "| plain" in said and "| EAGLE" in said and "| 2.50" in said
