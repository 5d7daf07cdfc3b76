"""Drives a runtime engine for the parity gate, so that the gate checks what ships."""

from __future__ import annotations

from collections.abc import Sequence

from ssdevice.contract import STEP
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.reference import Drafts, StepOut
from ssdevice.runtime.engine import Engine


class EngineDriver:
    """One conversation with an engine as a parity.Driver; as a context manager it closes the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.conversation = engine.new_conversation()

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        self.conversation.length = length
        token = self.conversation.prefill(tokens)
        return token, self._drafts() if STEP in self.engine.functions else []  # nothing would verify drafts

    def step(self, last: int, drafts: Drafts, length: int) -> StepOut:
        self.conversation.length = length
        self.conversation.drafts[:] = drafts
        return StepOut(self.conversation.step(last), self._drafts())

    def plain(self, last: int, length: int) -> int:
        self.conversation.length = length
        return self.conversation.step_plain(last)

    def rows(self, start: int, end: int) -> Array | None:
        return self.conversation.rows(start, end)

    def _drafts(self) -> Drafts:
        drafts: Drafts = self.conversation.drafts.tolist()
        return drafts

    def __enter__(self) -> EngineDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
