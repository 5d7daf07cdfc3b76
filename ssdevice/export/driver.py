"""Drives a runtime engine for the parity gate, so that the gate checks what ships.

Where a bundle has functions for a host that chooses, each step is also made in two calls: they must
give its tokens, and every other time the gate sees their drafts and rows instead of the step's.
"""

from collections.abc import Sequence
from typing import Self
from unittest.mock import patch

from ssdevice.contract import DRAFT, STEP, VERIFY, VERIFY_PLAIN
from ssdevice.errors import ParityError
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.reference import Drafts, StepOut
from ssdevice.runtime.engine import Engine


class EngineDriver:
    """One conversation with an engine as a parity.Driver; as a context manager it closes the
    engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.conversation = engine.new_conversation()
        self._steps = 0
        # In this context the host chooses tokens, the likeliest ones.
        self.choosing = patch.object(
            self.conversation, "chooser", lambda logits: int(logits.argmax())
        )

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        self.conversation.length = length
        token = self.conversation.prefill(tokens)
        # Without a step nothing would verify drafts.
        return token, self.conversation.drafts.tolist() if STEP in self.engine.functions else []

    def step(self, last: int, drafts: Drafts, length: int) -> StepOut:
        self.conversation.length = length
        repeated = any(
            len(set(row)) < len(row) for row in drafts
        )  # a host's walk takes the first of equal candidates
        if (
            VERIFY not in self.engine.functions
            or repeated
            or len(drafts) < len(self.conversation.drafts)
        ):
            return self._step(last, drafts)
        self._steps += DRAFT in self.engine.functions  # without it only the step's drafts are new
        calls = {STEP: self._step, VERIFY: self._choose}
        one, other = (STEP, VERIFY) if self._steps % 2 else (VERIFY, STEP)
        first = calls[one](last, drafts)
        second = calls[other](last, drafts)
        if first.tokens != second.tokens:
            raise ParityError(
                f"{one} leads to the tokens {first.tokens}, {other} to {second.tokens}"
            )
        return second

    def plain(self, last: int, length: int) -> int:
        self.conversation.length = length
        token = self.conversation.step_plain(last)
        if VERIFY_PLAIN in self.engine.functions:
            with self.choosing:
                chosen = self.conversation.step_plain(last)
            if chosen != token:
                raise ParityError(
                    f"{VERIFY_PLAIN} leads to token {chosen}, plain decoding to {token}"
                )
        return token

    def _step(self, last: int, drafts: Drafts) -> StepOut:
        self.conversation.drafts[: len(drafts)] = drafts
        tokens = self.conversation.step(last, short=len(drafts) < len(self.conversation.drafts))
        return StepOut(tokens, self.conversation.drafts.tolist())

    def _choose(self, last: int, drafts: Drafts) -> StepOut:
        """A step in two calls, whose host chooses greedily."""
        with self.choosing:
            return self._step(last, drafts)

    def rows(self, start: int, end: int) -> Array | None:
        return self.conversation.cache.rows(start, end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
