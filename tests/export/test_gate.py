"""The parity gate accepts right exports of any depth and refuses every wrong one, a single wrong
layer included.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

import pytest
import torch

from ssdevice.config import Schedule
from ssdevice.errors import ParityError
from ssdevice.export.exporter import ExportJob
from ssdevice.export.onnx.quantization import simulated
from ssdevice.export.parity import gate
from ssdevice.export.parity.follow import follow
from ssdevice.export.parity.gate import FLOAT_JITTER, HALF_JITTER, QUANTIZED_JITTER, check, compare
from ssdevice.export.parity.products import FLOAT16, FLOAT32, QUANTIZED
from ssdevice.export.parity.reference import TorchDriver
from ssdevice.export.parity.spread import DRAWS, Spread
from ssdevice.export.plan import Quant
from tests.export.deep import Artifact, deep_model, job_of
from tests.export.faults import FAULTS

LAYER = 17
KINDS = {
    "fp32": (Quant.FP32, FLOAT32, FLOAT_JITTER),
    "fp16": (Quant.FP32, FLOAT16, HALF_JITTER),
    "int8": (Quant.INT8, QUANTIZED, QUANTIZED_JITTER),
    "int4": (Quant.INT4, QUANTIZED, QUANTIZED_JITTER),
}


@cache
def deep_job(
    name: str = "llama", layers: int = 24, schedule: Schedule = Schedule.DEFERRED
) -> ExportJob:
    return job_of(deep_model(name, layers), schedule)


def gated(job: ExportJob, artifact: Artifact, kind: str) -> dict[str, float]:
    quant, bounds, jitter = KINDS[kind]
    with ExitStack() as stack:
        for model in (job.loaded.model, artifact.model):
            stack.enter_context(simulated(model, quant))
        return check(job, artifact, jitter, artifact, bounds)


SLOW = pytest.mark.slow
WIDE = pytest.mark.wide


DEEP = [
    ("llama", 48),
    ("gemma3_text", 24),
    ("gemma2", 32),
    ("olmo2", 24),
    ("phi3", 32),
    ("granite", 48),
    ("cohere2", 24),
    ("stablelm", 32),
    ("nemotron", 24),
    ("opt-before", 24),
]
QUICK = [
    *(
        pytest.param(*each, marks=WIDE)
        for each in (("llama", 24, "int8"), ("llama", 24, "fp16"), ("qwen3", 32, "int4"))
    ),
]


@pytest.mark.parametrize(
    ("name", "layers", "kind"),
    [*QUICK, *(pytest.param(*model, kind, marks=SLOW) for model in DEEP for kind in KINDS)],
)
def test_a_right_artifact_is_accepted_at_any_depth(name: str, layers: int, kind: str) -> None:
    job = deep_job(name, layers)
    facts = gated(job, Artifact(job, half=kind == "fp16"), kind)
    assert facts["products"] > 4 * layers
    assert facts["counts"] == job.plan.geometry.tree.emitted


PLACES = {
    "a-missing-residual": "layer 18",  # where it is read
    "an-adapters-scaling-twice": "layer 23",
    "a-stream-identifier-swapped": "layer 22",
    "a-stale-last-norm": "lm_head",
    "candidates-in-another-order": "next_drafts",
    "one-token-too-many": "count",
}


HALF = pytest.mark.xfail(
    strict=True, raises=pytest.fail.Exception, reason="within what 11 bits make of this layer"
)
ROUNDED_AWAY = {"attention-scaled-by-2-percent", "a-missing-residual"}
"""Faults of 2 percent that change a row by less than rounding every operation to float16 may."""


OFTEN = {
    "a-scale-off-by-2-percent",
    "a-missing-residual",
    "mask-off-by-one",
    "candidates-in-another-order",
    "a-stale-last-norm",
    "keys-and-values-swapped",
    "one-token-too-many",
    "a-stream-identifier-swapped",
}
"""Of what layers, last norm, candidates and counts do wrong: in `make test`, the rest in `make
wide`.
"""


def marks(kind: str, fault: str) -> list[pytest.MarkDecorator]:
    speed = [SLOW] if kind != "int8" else [] if fault in OFTEN else [WIDE]
    return [*speed, *([HALF] if kind == "fp16" and fault in ROUNDED_AWAY else [])]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, name, marks=marks(kind, name))
        for kind in ("fp32", "fp16", "int8")
        for name in FAULTS
    ],
)
def test_a_fault_in_one_layer_is_refused(fault: str, kind: str) -> None:
    job = deep_job()
    artifact = Artifact(job, half=kind == "fp16")
    torch.manual_seed(0)
    FAULTS[fault](artifact, LAYER)
    quant, bounds, _ = KINDS[kind]
    with ExitStack() as stack:
        for model in (job.loaded.model, artifact.model):
            stack.enter_context(simulated(model, quant))
        with pytest.raises(ParityError) as refusal:
            follow(job, artifact, bounds)
    assert PLACES.get(fault, f"layer {LAYER}") in str(refusal.value)


UNSEEN = {
    "fp32": {
        "one-column-off-by-2-percent",
        "attention-scaled-by-2-percent",
        "an-adapters-scaling-twice",
        "a-stream-identifier-swapped",
    },
    "int8": {
        "a-scale-off-by-2-percent",
        "one-column-off-by-2-percent",
        "attention-scaled-by-2-percent",
        "a-missing-residual",
        "an-adapters-scaling-twice",
        "a-stream-identifier-swapped",
        "a-stale-norm",
        "mask-off-by-one",
        "rows-see-the-next-one",
        "a-wrong-zero-point",
        "saturating-products",
        "a-transposed-square-matrix",
        "another-activation",
        "a-stale-last-norm",
        "candidates-in-another-order",
    },
}
"""Smaller, in the results of this model, than what its rounding has grown to: only products show
these.
"""
HIDDEN = pytest.mark.xfail(
    strict=True, raises=pytest.fail.Exception, reason="within the spread of right results"
)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, name, marks=[SLOW, HIDDEN] if name in UNSEEN[kind] else SLOW)
        for kind in UNSEEN
        for name in FAULTS
    ],
)
def test_results_alone_show_what_is_larger_than_rounding(fault: str, kind: str) -> None:
    """For targets whose products cannot be seen."""
    job = deep_job()
    artifact = Artifact(job)
    torch.manual_seed(0)
    FAULTS[fault](artifact, LAYER)
    quant, _, jitter = KINDS[kind]
    with ExitStack() as stack:
        for model in (job.loaded.model, artifact.model):
            stack.enter_context(simulated(model, quant))
        with pytest.raises(ParityError):
            compare(job, artifact, jitter)


def test_a_further_draw_runs_the_reference_once_beside_its_twin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[float] = []

    class Counted(TorchDriver):
        def __init__(self, job: ExportJob, jitter: float = 0.0, seed: int = 0) -> None:
            super().__init__(job, jitter, seed)
            made.append(jitter)

    monkeypatch.setattr(gate, "TorchDriver", Counted)
    monkeypatch.setattr(Spread, "fault", lambda *_: "a fault")
    job = deep_job("llama", 3)
    with pytest.raises(ParityError, match="a fault"):
        compare(job, Artifact(job), FLOAT_JITTER, steps=2)
    assert sorted(made) == [0.0] * DRAWS + [FLOAT_JITTER] * DRAWS
