"""Tokens in a package stay the integers that they are, whatever the vocabulary: none passes through
16 bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
torch = pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.config import Mode, Schedule, StreamConfig  # noqa: E402
from ssdevice.contract import FUNCTIONS, Geometry  # noqa: E402
from ssdevice.export.coreml.exporter import convert, save  # noqa: E402
from ssdevice.export.driver import EngineDriver  # noqa: E402
from ssdevice.export.mlprogram.options import CoreMLOptions, Deployment  # noqa: E402
from ssdevice.export.mlprogram.stored import stored_weights  # noqa: E402
from ssdevice.mil.program import Program  # noqa: E402
from ssdevice.mil.reader import Package  # noqa: E402
from ssdevice.model.loading import build  # noqa: E402
from ssdevice.runtime.coreml.engine import CoreMLEngine  # noqa: E402
from ssdevice.tree import Tree  # noqa: E402
from tests.export.coreml.tiny import STEP, package  # noqa: E402
from tests.model.tiny import randomise, tiny_config  # noqa: E402
from tests.model.torch_driver import TorchDriver  # noqa: E402

VOCAB = 70_000
"""More than 16 bits count, as in most models of today."""
TREE = Tree.of([[0], [0, 0]])
GEOMETRY = Geometry(
    layers=2,
    kv_heads=2,
    head_dim=8,
    vocab=VOCAB,
    gamma=TREE.depth,
    k=1,
    tree=TREE,
    context=24,
    chunk=5,
)
PROMPT = [69_999, 40_000, 3, 66_001, 32_768]


def test_what_is_gathered_is_not_narrowed():
    narrow = ("int16", "uint16")
    for function in Package.open(package()).functions.values():
        types = function.types
        makers = function.makers
        gathers = [operation for operation in function.operations if operation.kind == "gather"]
        assert gathers
        for operation in gathers:
            (source,) = operation.inputs["x"]
            assert types[source].dtype.name not in narrow or makers[source] == "const", (
                operation.output
            )


@pytest.mark.slow
@pytest.mark.parametrize("deployment", list(Deployment))
def test_tokens_beyond_16_bits_are_those_of_torch(deployment: Deployment, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    config = tiny_config(
        "llama",
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=32,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(hf, 1)
    model = build(hf.eval(), StreamConfig(Mode.SHARED, TREE.depth, 1), GEOMETRY.context).eval()
    chosen = CoreMLOptions(deployment_target=deployment)
    made = {name: convert(name, model, GEOMETRY, Schedule.DEFERRED, chosen) for name in FUNCTIONS}
    save(made, tmp_path / "model.mlpackage", STEP, deployment)
    program = Program(Package.open(tmp_path / "model.mlpackage"), "fp32")
    mine = EngineDriver(CoreMLEngine(program, GEOMETRY, {name: name for name in FUNCTIONS}))
    theirs = TorchDriver(model, TREE, 1, Schedule.DEFERRED, GEOMETRY.context, GEOMETRY.chunk)
    with stored_weights(model, program, FUNCTIONS):
        root, drafts = theirs.prefill(PROMPT, 0)
        assert mine.prefill(PROMPT, 0) == (root, drafts)
        following = theirs.plain(PROMPT[0], 5)
        assert mine.plain(PROMPT[0], 5) == following
        for forced in ([[following], [PROMPT[1]]], [[PROMPT[3]], [PROMPT[1]]]):
            expected = theirs.step(PROMPT[0], forced, 5)
            found = mine.step(PROMPT[0], forced, 5)
            assert found.tokens == expected.tokens[: len(found.tokens)]
            assert found.drafts == expected.drafts
            rows = theirs.rows(0, 6)[:, :, 0].transpose(0, 1, 3, 2, 4).reshape(4, 6, -1)
            assert np.abs(mine.rows(0, 6) - rows).max() < 0.05
