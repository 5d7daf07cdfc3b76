"""Written programs as the runtime runs them, as a parity Driver: what ships is what is checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ssdevice.contract import Geometry
from ssdevice.export.parity.reference import Array, Drafts, StepOut
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import ExecutorchEngine
from ssdevice.runtime.executorch.program import AdapterSlots


class ExecutorchDriver:
    """One conversation with a program; a context manager that unloads it. ``adapter``: the app's file for its slots."""

    def __init__(self, file: Path, geometry: Geometry, names: Sequence[str], adapter: Path | None = None) -> None:
        slots = AdapterSlots(adapter) if adapter is not None else None
        self.engine = ExecutorchEngine(file, geometry, names, EngineOptions(), adapter=slots)
        self.conversation = self.engine.new_conversation()

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """See parity.Driver."""
        self.conversation.length = length
        root = self.conversation.prefill(tokens)
        return root, self.conversation.drafts.tolist()

    def step(self, root: int, drafts: Drafts, length: int) -> StepOut:
        """See parity.Driver."""
        self.conversation.length = length
        self.conversation.drafts[:] = drafts
        tokens = self.conversation.step(root)
        return StepOut(tokens, self.conversation.drafts.tolist())

    def plain(self, root: int, length: int) -> int:
        """See parity.Driver."""
        self.conversation.length = length
        return self.conversation.step_plain(root)

    def rows(self, start: int, end: int) -> Array:
        """See parity.Driver."""
        return self.conversation.rows(start, end)

    def __enter__(self) -> ExecutorchDriver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
