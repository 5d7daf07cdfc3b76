"""The oracle's driver over a saved Core ML package: a state that starts full of garbage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssdevice.contract import COUNT, DRAFTS, KEYS, NEXT_DRAFTS, ROOT, STEP, TOKENS, VALUES
from ssdevice.export.coreml.driver import CoreMLDriver
from tests.conformance.oracle import Drafts, StepOutput
from tests.export.coreml.tiny import GEOMETRY


class PackageDriver:
    """See ``tests.conformance.oracle.Driver``. ``precision``: of the interpreter."""

    tree, gamma, k, vocab = GEOMETRY.tree, GEOMETRY.gamma, GEOMETRY.k, GEOMETRY.vocab
    context, chunk = GEOMETRY.context, GEOMETRY.chunk
    windows: Sequence[int] = ()

    def __init__(self, package: Path, precision: str) -> None:
        self.inner = CoreMLDriver.open(package, GEOMETRY, precision)
        draw = np.random.default_rng(9)
        for name in (KEYS, VALUES):
            garbage = 3 * draw.standard_normal(self.inner.state.read(name).shape)
            self.inner.state.write(name, garbage.astype(np.float16))

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """See Driver."""
        return self.inner.prefill(tokens, length)

    def step(self, root: int, drafts: Drafts, length: int) -> StepOutput:
        """All A tokens, valid or not."""
        integers = {ROOT: np.array([root], np.int32), DRAFTS: np.array(drafts, np.int32)}
        out = self.inner._run(STEP, integers, length)
        return StepOutput(out[TOKENS].tolist(), int(out[COUNT][0]), out[NEXT_DRAFTS].tolist())

    def plain(self, root: int, length: int) -> int:
        """See Driver."""
        return self.inner.plain(root, length)

    def rows(self, start: int, end: int) -> np.ndarray[Any, Any]:
        """See Driver."""
        return self.inner.rows(start, end)
