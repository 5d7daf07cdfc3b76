"""Two bundles as an arm: a smaller model drafts, one without streams verifies (2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ssdevice.contract import STEP
from ssdevice.peers.arm import Answer, Arm, Json, Offers, Setup
from ssdevice.peers.ours import BundleEngine
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import decode, prefill

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.runtime.engine import EngineOptions

FEW = 4
"""Tokens that the smaller model reads one by one; more are a prefill."""


def offers(bundle: Bundle, drafter: Bundle, options: EngineOptions, setup: Setup, label: str) -> Offers:
    """The arm of a bundle, called ``label``, for which ``drafter`` drafts; none if it has streams or no step."""
    if bundle.manifest.mode is None and STEP in bundle.function_names(None):
        engine = asdict(options) | {"threads": setup.threads}
        big, small = (str(each.folder.resolve()) for each in (bundle, drafter))
        yield Arm(
            name=f"{label}, drafts of {drafter.folder.resolve().name}",
            module=__name__,
            settings=setup.settings(bundle=big, drafter=small, options=engine),
            disk_bytes=bundle.manifest.total_bytes + drafter.manifest.total_bytes,
            plain=f"{label}, plain",
            ours=True,
        )


def open_engine(settings: Json) -> TwoModels:
    """Sessions of both bundles."""
    return TwoModels(settings["bundle"], settings["drafter"], settings["options"])


class DraftModel:
    """An ``Advance`` (see ``ssdevice.runtime.loop``): ``small`` writes the drafts of each step, greedily."""

    def __init__(self, small: Conversation) -> None:
        self.small = small

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step."""
        small, text = self.small, [*conversation.text[: conversation.length], last]
        small.length = small.shared(text)
        unread = text[small.length :]
        if len(unread) > FEW:
            token = prefill(small, unread)
        else:
            for read in unread:
                token = self._read(read)
        for depth in range(len(conversation.drafts)):
            conversation.drafts[depth] = token
            if depth + 1 < len(conversation.drafts):
                token = self._read(token)
        return conversation.step(last)

    def _read(self, token: int) -> int:
        following = self.small.step_plain(token)
        self.small.length += 1
        return following


class TwoModels(BundleEngine):
    """``bundle`` verifies what ``drafter`` drafts; ``options``: the fields of EngineOptions, for both."""

    def __init__(self, bundle: str, drafter: str, options: Json) -> None:
        from ssdevice.runtime.engine import EngineOptions
        from ssdevice.runtime.session import Session

        super().__init__(bundle, None, "plain", options, {})
        self._conversation = self._session.engine.new_conversation()
        small = Session.open(drafter, options=EngineOptions(**options))
        self._advance = DraftModel(small.engine.new_conversation())

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        self._conversation.length = self._advance.small.length = 0
        accept = self._session.tokenizer.output(()).push
        for run in decode(self._conversation, prompt, self._advance, accept, answer.max_tokens):
            answer.add(run.tokens)
