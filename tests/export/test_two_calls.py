"""A step in two calls with the cache as state, run in torch: what it commits and drafts is what a
step does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.contract import (
    CHOOSING,
    DRAFT,
    FUNCTIONS,
    KEYS,
    LOGITS,
    PATH,
    VALUES,
    VERIFY,
    CacheForm,
    Geometry,
    functions,
)
from ssdevice.errors import ParityError
from ssdevice.export.forms import function_module
from ssdevice.export.state_form import InternalCacheForm
from ssdevice.model.loading import build
from ssdevice.runtime.engine import Cache, Engine, Inputs, Outputs, rows_of_state
from ssdevice.tree import Tree
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.model.tiny import VOCAB, tiny_model
from tests.runtime.sampling.promise import SAMPLERS, check_forced_drafts

TREE = Tree.of([[0], [1], [1, 0], [1, 1], [1, 0, 0]])
CONTEXT = 40
CHUNK = 3


class TorchEngine(Engine):
    """The functions of the contract in torch, over one state."""

    def __init__(
        self, name: str, config: StreamConfig, stacked: bool, schedule: Schedule = Schedule.DEFERRED
    ) -> None:
        hf = tiny_model(name)
        model = build(hf, config, CONTEXT, TREE.depth).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            for value in model.streams.parameters():
                value.copy_(torch.randn_like(value) * 0.3)
        backbone = model.backbone
        g = Geometry(
            len(backbone.layers),
            backbone.kv_heads,
            backbone.head_dim,
            VOCAB,
            TREE.depth,
            TREE.width,
            TREE,
            CONTEXT,
            CHUNK,
            hf.config.hidden_size,
        )
        super().__init__(g, frozenset(FUNCTIONS + CHOOSING), Path("torch"))
        self.stacked = stacked
        self.specs = functions(g, CacheForm.INTERNAL, "float32")
        self.forms = {
            function: InternalCacheForm(
                function, function_module(function, model, g, schedule), g, stacked=stacked
            )
            for function in self.specs
        }

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> TorchCache:
        return TorchCache(self, inputs)

    def release(self) -> None:
        self.forms.clear()


class TorchCache(Cache):
    def __init__(self, engine: TorchEngine, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.engine = engine
        self.state: dict[str, Any] = {}

    def call(self, function: str, length: int) -> Outputs:
        form = self.engine.forms[function]
        spec = self.engine.specs[function]
        for name in (KEYS, VALUES):
            setattr(form, name, self.state.setdefault(name, getattr(form, name)))
        given = [torch.from_numpy(self.inputs[tensor.name]).clone() for tensor in spec.inputs]
        with torch.no_grad():
            out = form(*given)
        assert [tuple(tensor.shape) for tensor in out] == [tensor.shape for tensor in spec.outputs]
        return {
            tensor.name: value.numpy().copy()
            for tensor, value in zip(spec.outputs, out, strict=True)
        }

    def rows(self, start: int, end: int) -> NDArray[Any]:
        layers = range(self.engine.geometry.layers)
        held = []
        for name in (KEYS, VALUES):
            held.append(torch.stack([self.state[name][i] for i in layers]))
        return rows_of_state(*(part.numpy() for part in held), start, end)


SHARED = StreamConfig(gamma=3, msa_layers=1)
CONFIGS = {
    "shared-stacked": (SHARED, True),
    "lossless-by layer": (
        StreamConfig(Mode.LOSSLESS, gamma=3, msa_layers=1, adapter_rank=4, token_rank=2),
        False,
    ),
    "draft layers": (
        StreamConfig(Mode.LOSSLESS, gamma=3, msa_layers=0, adapter_rank=0, draft_layers=1),
        True,
    ),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def engine(request: pytest.FixtureRequest) -> TorchEngine:
    return TorchEngine("mistral", *request.param)


@pytest.mark.parametrize("sampling", SAMPLERS[2:4], ids=["top-p", "min-p and a penalty"])
def test_forced_drafts_end_at_every_node_and_change_nothing(
    engine: TorchEngine, sampling: Any
) -> None:
    assert check_forced_drafts(engine, sampling, seeds=2) == {1, 2, 3, 4}


def test_two_calls_commit_and_draft_as_one(engine: TorchEngine) -> None:
    """The driver makes every step both ways, and checks in turn what each has left behind."""
    driver = OracleDriver(engine)
    check(drive(driver, [7, 21, 3, 44, 9]), driver, row_tolerance=1e-4, perturbation_tolerance=1e-4)


@pytest.mark.parametrize("broken", ["rows", "logits"])
def test_the_gate_notices_a_wrong_half(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Rows that are not moved to the front, or logits of another node."""
    call = TorchCache.call

    def wrong(cache: TorchCache, function: str, length: int) -> Outputs:
        if broken == "rows" and function == DRAFT:
            cache.inputs[PATH][:] = range(len(cache.inputs[PATH]))
        out = dict(call(cache, function, length))
        if broken == "logits" and function == VERIFY:
            out[LOGITS] = np.roll(out[LOGITS], 1, axis=0)
        return out

    monkeypatch.setattr(TorchCache, "call", wrong)
    driver = OracleDriver(engine)
    with pytest.raises((AssertionError, ParityError)):
        check(
            drive(driver, [7, 21, 3, 44, 9]),
            driver,
            row_tolerance=1e-4,
            perturbation_tolerance=1e-4,
        )


def test_the_cache_holds_the_rows_of_all_nodes() -> None:
    wide = Tree.of([[0], *[[0, i] for i in range(40)]])
    for hidden, rows in ((0, 64), (8, 96)):
        g = Geometry(1, 1, 8, 50, 2, 40, wide, 50, 5, hidden)
        assert g.capacity == rows
