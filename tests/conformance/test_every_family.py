"""Every family exports to every target with an adapter, and says what transformers says, in every
mode.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.bench.equality import Asked, Comparison
from ssdevice.bench.modes import compare_modes
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import Precision
from ssdevice.cli import main
from ssdevice.export.target import export_target
from ssdevice.model.families import FAMILIES
from ssdevice.runtime.engine import EngineOptions, open_engine
from tests.conformance.families import PROMPT, TOKENS, generated, write_family
from tests.model.tiny import MODELS
from tests.once import made_once

TREE = "[[0],[1],[0,0],[0,0,0]]"
NODES = 5
CELLS = [
    *(("onnx", quant) for quant in ("fp32", "int8", "int4")),
    *(("coreml", quant) for quant in ("fp16", "int4")),
    *(("coreai", quant) for quant in ("fp32", "int4")),
    *(("executorch", quant) for quant in ("fp32", "int8", "int4")),
]
PACKAGES = {"coreml": "coremltools", "executorch": "executorch", "coreai": "coreai_torch"}


def test_every_family_is_here() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("target", "quant"), CELLS)
@pytest.mark.parametrize("family", MODELS)
def test_every_family_exports_to_every_target(
    family: str, target: str, quant: str, tmp_path: Path
) -> None:
    if target == "coreai" and find_spec(PACKAGES[target]) is None:
        pytest.skip("needs coreai-core and coreai-torch")
    if target in PACKAGES:
        pytest.importorskip(PACKAGES[target])
    folder = made_once(f"families/{family}", lambda out: write_family(out, family))
    out = tmp_path / "bundle"
    options = [
        "--context",
        "64",
        "--chunk",
        "8",
        "--tree",
        TREE,
        "--quant",
        quant,
        "--target",
        target,
        "--quiet",
    ]
    models = ["--model", str(folder / "base"), "--adapter", f"app={folder / 'adapter'}"]
    assert main(["export", *models, *options, "--out", str(out)]) == 0
    bundle = Bundle.open(out)
    precision = Precision(quant)
    engine = open_engine(bundle, None, EngineOptions())
    shown = export_target(target).logits_engine(bundle, None, EngineOptions())
    result = compare_modes(engine, shown, Asked([PROMPT], (), TOKENS, precision, lambda *_: None))
    engine.close()
    assert result.nodes_ended == set(range(NODES))
    assert (
        Comparison.faults(result) == []
    )  # differences are near-ties, or there are none where no logits are shown
    if precision is Precision.FP32:
        assert result.differences == [] and result.answers == [generated(folder)]
