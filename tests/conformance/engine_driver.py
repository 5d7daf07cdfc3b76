"""Any engine as the oracle drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ssdevice.export.driver import EngineDriver
from ssdevice.runtime.engine import Engine
from tests.conformance.oracle import Drafts, StepOutput


class OracleDriver:
    """A conversation with an engine as ``tests.conformance.oracle.Driver``; entries beyond a step's
    count are 0.
    """

    def __init__(self, engine: Engine, windows: Sequence[int] = ()) -> None:
        self.inner = EngineDriver(engine)
        self.windows = windows
        g = engine.geometry
        self.tree = g.tree
        self.gamma = g.gamma
        self.k = g.k
        self.vocab = g.vocab
        self.context = g.context
        self.chunk = g.chunk
        self.prefill = self.inner.prefill
        self.plain = self.inner.plain

    def step(self, last: int, drafts: Drafts, length: int) -> StepOutput:
        out = self.inner.step(last, drafts, length)
        padded = [*out.tokens, *[0] * (self.tree.emitted - len(out.tokens))]
        return StepOutput(padded, len(out.tokens), out.drafts)

    def rows(self, start: int, end: int) -> np.ndarray[Any, Any]:
        rows = self.inner.rows(start, end)
        assert rows is not None
        return rows
