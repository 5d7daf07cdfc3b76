"""Drives a runtime engine for the parity gate, so that the gate checks what ships.

Where a bundle has functions for a host that chooses, each step is made in two calls first: they must give its tokens,
and every other time the gate sees their drafts instead of the step's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ssdevice.contract import DRAFT, STEP, VERIFY, VERIFY_PLAIN
from ssdevice.errors import ParityError
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.reference import Drafts, StepOut
from ssdevice.runtime.engine import Engine


class EngineDriver:
    """One conversation with an engine as a parity.Driver; as a context manager it closes the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.conversation = engine.new_conversation()
        self._steps = 0

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        self.conversation.length = length
        token = self.conversation.prefill(tokens)
        return token, self._drafts() if STEP in self.engine.functions else []  # nothing would verify drafts

    def step(self, last: int, drafts: Drafts, length: int) -> StepOut:
        self.conversation.length = length
        chosen = self._choose(last, drafts) if VERIFY in self.engine.functions else None
        self.conversation.drafts[:] = drafts
        out = StepOut(self.conversation.step(last), self._drafts())
        if chosen is None:
            return out
        if chosen.tokens != out.tokens:
            raise ParityError(f"{VERIFY} leads to the tokens {chosen.tokens}, {STEP} to {out.tokens}")
        self._steps += 1
        return chosen if self._steps % 2 and DRAFT in self.engine.functions else out

    def plain(self, last: int, length: int) -> int:
        self.conversation.length = length
        token = self.conversation.step_plain(last)
        if VERIFY_PLAIN in self.engine.functions:
            with self._choosing():
                chosen = self.conversation.step_plain(last)
            if chosen != token:
                raise ParityError(f"{VERIFY_PLAIN} leads to token {chosen}, plain decoding to {token}")
        return token

    def _choose(self, last: int, drafts: Drafts) -> StepOut:
        """A step in two calls, whose host chooses greedily."""
        self.conversation.drafts[:] = drafts
        with self._choosing():
            return StepOut(self.conversation.step(last), self._drafts())

    @contextmanager
    def _choosing(self) -> Iterator[None]:
        """In this context the host chooses tokens, the likeliest ones."""
        self.conversation.chooser = lambda logits: int(logits.argmax())
        try:
            yield
        finally:
            self.conversation.chooser = None

    def rows(self, start: int, end: int) -> Array | None:
        return self.conversation.rows(start, end)

    def _drafts(self) -> Drafts:
        drafts: Drafts = self.conversation.drafts.tolist()
        return drafts

    def __enter__(self) -> EngineDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
