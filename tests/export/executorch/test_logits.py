"""Programs give their logits where the export was asked for them, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")

from ssdevice.cli import main
from ssdevice.contract import LOGITS, PLAIN, PREFILL, STEP
from ssdevice.errors import ConfigError
from ssdevice.export.executorch.target import GIVES_LOGITS, ExecutorchOptions, ExecutorchTarget
from ssdevice.export.plan import ExportOptions, Quant
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import ExecutorchEngine
from tests.export.executorch import programs


@pytest.mark.lowering
def test_a_program_gives_no_logits_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = programs.slots()
    assert GIVES_LOGITS not in bundle.manifest.notes
    engine = ExecutorchEngine.of(bundle, "one", EngineOptions())
    try:
        assert all(LOGITS not in engine.outputs(name) for name in (STEP, PREFILL, PLAIN))
    finally:
        engine.close()
    assert ExecutorchTarget().logits_engine(bundle, "one", EngineOptions()) is None
    given = [
        str(bundle.folder),
        "--app",
        "one",
        "--limit",
        "1",
        "--max-tokens",
        "4",
        "--json",
        "--quiet",
    ]
    assert main(["verify", *given]) == 0
    assert json.loads(capsys.readouterr().out)["equality"]["logits"].startswith("not measured")


def test_with_logits_verify_measures_how_much_they_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = programs.bundle()
    assert GIVES_LOGITS in bundle.manifest.notes
    engine = ExecutorchTarget().logits_engine(bundle, None, EngineOptions())
    assert engine is not None
    try:
        conversation = engine.new_conversation()
        root = conversation.prefill([5, 6, 7])
        conversation.length = 3
        token = conversation.step_plain(root)
        assert conversation.logits.shape == (1, bundle.geometry.vocab)
        assert int(np.argmax(conversation.logits[0])) == token
        tokens = conversation.step(root)
        assert np.argmax(conversation.logits, axis=1).tolist() == tokens and tokens[0] == token
    finally:
        engine.close()
    assert (
        main(
            ["verify", str(bundle.folder), "--limit", "1", "--max-tokens", "4", "--json", "--quiet"]
        )
        == 0
    )
    equality = json.loads(capsys.readouterr().out)["equality"]
    assert 0 <= equality["largest_logit_change"] <= equality["ceiling"] and "logits" not in equality


def test_logits_are_refused_for_targets_that_show_them_anyway(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--delegate and --logits are ExecuTorch's"):
        ExportOptions(
            "m", "onnx", Quant.INT8, tmp_path, target_options=(ExecutorchOptions(logits=True),)
        )
