"""Inputs exactly between two levels may take either: no fault, and none is hidden by it."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ssdevice.errors import ParityError
from ssdevice.export.exporter import ExportJob
from ssdevice.export.onnx.quantization import simulated
from ssdevice.export.parity.difference import distinct, worst_column
from ssdevice.export.parity.follow import follow
from ssdevice.export.parity.products import QUANTIZED
from ssdevice.export.plan import Quant
from tests.export.deep import Artifact, deep_model, job_of
from tests.export.faults import linear

EDGE = 50
LARGEST = 100
"""Codes of an embedding: in a block of these EDGE is 63.5 of 127 levels."""
SOME = slice(40)
EVERY = slice(None)
"""Tokens: padding, which is half of a chunk, and a quarter of the others; all."""
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def job_at_edges(tokens: slice) -> ExportJob:
    """A model whose layer 0 reads codes, which are at an edge in a third of the row of each of
    these tokens.
    """
    model = deep_model("llama", 3)
    table = model.backbone.embed_tokens.weight.data
    draw = np.random.default_rng(0)
    codes = draw.integers(1, EDGE, table.shape)
    codes[tokens] = np.where(draw.random(table.shape) < 1 / 3, EDGE, codes)[tokens]
    codes[:, ::32] = LARGEST
    codes[:, 0] = 127  # so that one level of eight bits is one code
    table[:] = torch.from_numpy(codes * draw.choice([-1, 1], table.shape))
    model.backbone.layers[0].input_layernorm.weight.data.fill_(1.0)
    return job_of(model)


def followed(job: ExportJob, artifact: Artifact) -> None:
    """Follow an artifact whose inputs differ in their last bit when they are rounded."""
    draw = torch.Generator().manual_seed(0)

    def otherwise(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Equal rows differ in the same way."""
        return (inputs[0] * (1 + 2e-7 * torch.randn(inputs[0].shape[-1], generator=draw)),)

    for path in PROJECTIONS:
        linear(artifact, 0, path).register_forward_pre_hook(otherwise)
    with ExitStack() as stack:
        for model in (job.loaded.model, artifact.model):
            stack.enter_context(simulated(model, Quant.INT4))
        follow(job, artifact, QUANTIZED)


@pytest.mark.parametrize("tokens", [SOME, EVERY])
def test_a_right_artifact_at_edges_is_accepted(tokens: slice) -> None:
    job = job_at_edges(tokens)
    followed(job, Artifact(job))


@pytest.mark.parametrize("tokens", [SOME, EVERY])
def test_a_wrong_column_at_edges_is_refused(tokens: slice) -> None:
    job = job_at_edges(tokens)
    artifact = Artifact(job)
    linear(artifact, 0, PROJECTIONS[0]).weight.data[7] *= 1.02
    with pytest.raises(ParityError, match=r"layer 0, self_attn.q_proj: .* in column 7"):
        followed(job, artifact)


def test_equal_rows_are_one_sample() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    rows[9:] = rows[9]  # padding
    theirs = rows.copy()
    theirs[9:, 3] += 0.1
    assert worst_column(rows, theirs)[0] == 3 and worst_column(rows, theirs)[1] > 0.05
    assert (
        len(distinct(rows)) == 10
        and worst_column(rows[distinct(rows)], theirs[distinct(rows)])[1] == 0
    )
    theirs[:, 3] = rows[:, 3] * 1.02
    assert worst_column(rows[distinct(rows)], theirs[distinct(rows)])[1] > 0.01
