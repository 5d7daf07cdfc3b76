"""Every family's step converts and computes the torch module's rows, stream adapters of lossless
mode included.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.contract import COUNT, DRAFTS, KEYS, LENGTH, ROOT, STEP, TOKENS, VALUES, Geometry
from ssdevice.export.coreml.exporter import convert, save
from ssdevice.export.mlprogram.options import CoreMLOptions
from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package
from ssdevice.model.loading import build
from ssdevice.tree import Tree
from tests.model.tiny import MODELS, tiny_model
from tests.model.torch_driver import TorchDriver

TREE = Tree.of([[0], [1], [0, 0]])
CONTEXT = 24
CHUNK = 5
STEPS = 6
ROW_TOLERANCE = 0.02
"""Of the largest value; weights and tables are float16, measured is up to 0.009."""


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_rows_of_chained_steps(family: str, tmp_path: Path):
    model = build(
        tiny_model(family), StreamConfig(Mode.LOSSLESS, TREE.depth, 1, adapter_rank=4), CONTEXT
    ).eval()
    backbone = model.backbone
    vocab = int(backbone.config.vocab_size)
    geometry = Geometry(
        backbone.num_layers,
        backbone.kv_heads,
        backbone.head_dim,
        vocab,
        TREE.depth,
        TREE.width,
        TREE,
        CONTEXT,
        CHUNK,
    )
    made = convert(STEP, model, geometry, Schedule.FUSED, CoreMLOptions())
    save({STEP: made}, tmp_path / "step.mlpackage", STEP)
    reference = TorchDriver(model, TREE, TREE.width, Schedule.FUSED, CONTEXT, CHUNK)
    reference.cache.zero_()
    program = Program(Package.open(tmp_path / "step.mlpackage"))
    state = program.make_state()
    agreed = 0
    for i in range(STEPS):
        root = (7 * i + 3) % vocab
        drafts = [[1 + i, 2], [3, 4 + i]]
        integers = {ROOT: [root], DRAFTS: drafts, LENGTH: [i]}
        out = program.run(
            STEP, {name: np.array(value, np.int32) for name, value in integers.items()}, state
        )
        expected = reference.step(root, drafts, i)
        count = int(out[COUNT][0])
        agreed += (
            count == expected.count and out[TOKENS][:count].tolist() == expected.tokens[:count]
        )
        for part, name in enumerate((KEYS, VALUES)):
            theirs = reference.cache[:, part, 0, :, i].numpy()
            assert (
                np.abs(state[name][:, :, i] - theirs).max() <= ROW_TOLERANCE * np.abs(theirs).max()
            )
    assert agreed >= STEPS - 1  # random models have near-ties
