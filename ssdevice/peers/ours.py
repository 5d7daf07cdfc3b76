"""A bundle as an arm: plain, speculative and adaptive, or with the drafts of a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict

from ssdevice import __version__
from ssdevice.bundle.folder import Bundle
from ssdevice.contract import STEP
from ssdevice.peers.arm import Answer, Arm, Json, Offers, Setup
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE, decode, prefill
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session

FEW = 4
"""Tokens that the smaller model reads one by one; more are a prefill."""


def offers(
    bundle: Bundle, app: str | None, options: EngineOptions, setup: Setup, label: str
) -> Offers:
    """The arms of a bundle's app (None: its default app).

    ``label``: what the bundle is called in the table.
    """
    from ssdevice.bench.runner import available_modes  # here: a worker does not need it

    available = available_modes(bundle.function_names(app), bundle.manifest.mode is not None)
    plain = f"{label}, plain"
    modes = {plain: available[0]}
    for mode in (SPECULATIVE, ADAPTIVE):
        if mode in available:
            modes[f"{label}, {mode}"] = mode
    engine = asdict(options) | {"threads": setup.threads}
    for name, mode in modes.items():
        yield Arm(
            name=name,
            module=__name__,
            settings=setup.settings(
                bundle=str(bundle.folder.resolve()), app=app, mode=mode, options=engine
            ),
            disk_bytes=bundle.manifest.total_bytes,
            plain=plain if name != plain else None,
            ours=True,
        )


def open_engine(settings: Json) -> BundleEngine:
    """A session of the bundle, or of both bundles where a ``drafter`` is named."""
    if "drafter" in settings:
        return TwoModels(settings["bundle"], settings["drafter"], settings["options"])
    return BundleEngine(
        bundle=settings["bundle"],
        app=settings["app"],
        mode=settings["mode"],
        options=settings["options"],
        sampling=settings["sampling"],
    )


class BundleEngine:
    """An ``Engine`` of a bundle's app, which decodes in one ``mode``.

    ``options``: the fields of EngineOptions. ``sampling``: those of Sampling.
    """

    def __init__(
        self, bundle: str, app: str | None, mode: str, options: Json, sampling: Json
    ) -> None:
        self._sampling = Sampling(**sampling) if sampling else None
        self._session = Session.open(bundle, app=app, options=EngineOptions(**options))
        self._mode = mode
        manifest = self._session.bundle.manifest
        self.version = f"ssdevice {__version__}, {manifest.target}"
        self.weights = manifest.precision.value

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        """See ``Engine``."""
        self._session.reset()  # nothing of the prompt is in the cache
        # Text is decoded on the way, as for a user; the peers are measured without.
        runs = self._session.runs(
            prompt, max_tokens=answer.max_tokens, mode=self._mode, sampling=self._sampling
        )
        with closing(runs):
            for run in runs:
                answer.add(run.tokens)


def drafted_offers(
    bundle: Bundle, drafter: Bundle, options: EngineOptions, setup: Setup, label: str
) -> Offers:
    """The arm of a bundle, called ``label``, for which ``drafter`` drafts.

    None if the bundle has streams or no step.
    """
    if bundle.manifest.mode is not None or STEP not in bundle.function_names(None):
        return
    engine = asdict(options) | {"threads": setup.threads}
    big = bundle.folder.resolve()
    small = drafter.folder.resolve()
    yield Arm(
        name=f"{label}, drafts of {small.name}",
        module=__name__,
        settings=setup.settings(bundle=str(big), drafter=str(small), options=engine),
        disk_bytes=bundle.manifest.total_bytes + drafter.manifest.total_bytes,
        plain=f"{label}, plain",
        ours=True,
    )


class DraftModel:
    """An ``Advance`` (see ``ssdevice.runtime.loop``) in which ``small`` drafts, greedily."""

    def __init__(self, small: Conversation) -> None:
        self.small = small

    def __call__(self, conversation: Conversation, last: int) -> Sequence[int]:
        """The tokens after ``last``, from a step."""
        small = self.small
        text = [*conversation.text[: conversation.length], last]
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
        """The small model's token after one that it has not read yet."""
        following = self.small.step_plain(token)
        self.small.length += 1
        return following


class TwoModels(BundleEngine):
    """``bundle`` verifies what ``drafter`` drafts. ``options``: EngineOptions' fields, for both."""

    def __init__(self, bundle: str, drafter: str, options: Json) -> None:
        super().__init__(bundle, None, "plain", options, {})
        self._conversation = self._session.engine.new_conversation()
        small = Session.open(drafter, options=EngineOptions(**options))
        self._advance = DraftModel(small.engine.new_conversation())

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        """See ``Engine``."""
        self._conversation.length = 0
        self._advance.small.length = 0
        accept = self._session.tokenizer.output(()).push
        for run in decode(self._conversation, prompt, self._advance, accept, answer.max_tokens):
            answer.add(run.tokens)
