"""Two bundles as an arm: a smaller model drafts, one without streams verifies (2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ssdevice.bench.peers.arm import Answer, Arm, Json, Offers, Setup
from ssdevice.contract import STEP
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
        known = min(small.length, len(text) - 1)  # the last token is read again, to predict the next
        small.length = next((i for i in range(known) if small.text[i] != text[i]), known)
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


class TwoModels:
    """``bundle`` verifies what ``drafter`` drafts; ``options``: the fields of EngineOptions, for both."""

    def __init__(self, bundle: str, drafter: str, options: Json) -> None:
        from ssdevice import __version__
        from ssdevice.runtime.engine import EngineOptions
        from ssdevice.runtime.session import Session

        session, small = (Session.open(folder, options=EngineOptions(**options)) for folder in (bundle, drafter))
        self._output = session.tokenizer.output
        self._conversation, self._small = session.engine.new_conversation(), small.engine.new_conversation()
        assert session.bundle is not None
        manifest = session.bundle.manifest
        self.version = f"ssdevice {__version__}, {manifest.target}"
        self.weights = manifest.precision.value

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        self._conversation.length = self._small.length = 0
        advance, accept = DraftModel(self._small), self._output(()).push
        for run in decode(self._conversation, prompt, advance, accept, answer.max_tokens):
            answer.add(run.tokens)
