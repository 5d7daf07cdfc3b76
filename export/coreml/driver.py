"""A saved Core ML package run operation by operation, as the parity gate drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    KEYS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROOT,
    STEP,
    TOKENS,
    VALID,
    VALUES,
    Geometry,
)
from ssdevice.export.parity.reference import Array, Drafts, StepOut
from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package


class CoreMLDriver:
    """One conversation on a package, whose state the package itself writes.

    ``names``: the package's names of the contract's functions, where they are others.
    """

    def __init__(self, program: Program, geometry: Geometry, names: Mapping[str, str] | None = None) -> None:
        self.geometry, self.program = geometry, program
        self.names = names or {}
        self.state = program.make_state()

    @classmethod
    def open(cls, package: Path, geometry: Geometry, precision: str = "fp16") -> CoreMLDriver:
        """A driver of a package whose functions have the contract's names."""
        return cls(Program(Package.open(package), precision), geometry)

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """See parity.Driver."""
        chunk = np.zeros(self.geometry.chunk, np.int32)
        chunk[: len(tokens)] = tokens
        out = self._run(PREFILL, {CHUNK: chunk, VALID: _int(len(tokens))}, length)
        return int(out[NEXT_ROOT][0]), out[NEXT_DRAFTS].tolist() if NEXT_DRAFTS in out else []

    def step(self, root: int, drafts: Drafts, length: int) -> StepOut:
        """See parity.Driver."""
        out = self._run(STEP, {ROOT: _int(root), DRAFTS: np.array(drafts, np.int32)}, length)
        count = int(out[COUNT][0])
        return StepOut(out[TOKENS][:count].tolist(), out[NEXT_DRAFTS].tolist())

    def plain(self, root: int, length: int) -> int:
        """See parity.Driver."""
        return int(self._run(PLAIN, {ROOT: _int(root)}, length)[TOKENS][0])

    def rows(self, start: int, end: int) -> Array:
        """See parity.Driver."""
        held = self.state.arrays
        both = np.stack([held[KEYS], held[VALUES]], axis=1)[:, :, :, start:end]
        # [layers, 2, kv_heads, n, hd] -> keys and values of each layer in turn, heads side by side
        rows: Array = both.transpose(0, 1, 3, 2, 4).reshape(2 * self.geometry.layers, end - start, -1)
        return rows.astype(np.float32)

    def _run(self, function: str, integers: Mapping[str, Array], length: int) -> dict[str, Array]:
        return self.program.run(self.names.get(function, function), {**integers, LENGTH: _int(length)}, self.state)


def _int(value: int) -> Array:
    return np.array([value], np.int32)
