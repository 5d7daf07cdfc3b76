"""A bundle as an arm: plain, and speculative and adaptive if its app has streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from ssdevice.peers.arm import Answer, Arm, Json, Offers, Setup
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.runtime.engine import EngineOptions


def offers(bundle: Bundle, app: str | None, options: EngineOptions, setup: Setup, label: str) -> Offers:
    """The arms of a bundle's app (None: its default app). ``label``: what the bundle is called in the table."""
    from ssdevice.bench.runner import available_modes  # here: a worker does not need it

    available = available_modes(bundle.function_names(app), bundle.manifest.mode is not None)
    plain = f"{label}, plain"
    modes = {plain: available[0]} | {f"{label}, {mode}": mode for mode in (SPECULATIVE, ADAPTIVE) if mode in available}
    engine = asdict(options) | {"threads": setup.threads}
    for name, mode in modes.items():
        yield Arm(
            name=name,
            module=__name__,
            settings=setup.settings(bundle=str(bundle.folder.resolve()), app=app, mode=mode, options=engine),
            disk_bytes=bundle.manifest.total_bytes,
            plain=plain if name != plain else None,
            ours=True,
        )


def open_engine(settings: Json) -> BundleEngine:
    """A session of the bundle."""
    names = ("bundle", "app", "mode", "options", "sampling")
    return BundleEngine(*(settings[name] for name in names))


class BundleEngine:
    """``mode``: one of the decoding modes; ``options``: the fields of EngineOptions; ``sampling``: of Sampling."""

    def __init__(self, bundle: str, app: str | None, mode: str, options: Json, sampling: Json) -> None:
        from ssdevice import __version__
        from ssdevice.runtime.engine import EngineOptions
        from ssdevice.runtime.sampling.options import Sampling
        from ssdevice.runtime.session import Session

        self._sampling = Sampling(**sampling) if sampling else None
        self._session = Session.open(bundle, app=app, options=EngineOptions(**options))
        self._mode = mode
        manifest = self._session.bundle.manifest
        self.version = f"ssdevice {__version__}, {manifest.target}"
        self.weights = manifest.precision.value

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        self._session.reset()  # nothing of the prompt is in the cache
        # Text is decoded on the way, as for a user; the peers are measured without.
        most, mode, sampling = answer.max_tokens, self._mode, self._sampling
        with closing(self._session.runs(prompt, max_tokens=most, mode=mode, sampling=sampling)) as runs:
            for run in runs:
                answer.add(run.tokens)
