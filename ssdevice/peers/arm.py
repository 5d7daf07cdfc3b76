"""What the engines of a comparison have in common.

A peer is a module of this package with two functions: ``offers(setup)`` says what can be measured
here, and ``open_engine(settings)`` opens one of these in a worker. Workers may run in an
environment without this project's dependencies: a peer's module imports nothing but the standard
library when it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from ssdevice.errors import SSDeviceError

Json = dict[str, Any]

SAMPLING = ("temperature", "top_k", "top_p", "seed")
"""What may be asked of every engine: the fields of ``Sampling`` that all of them have."""

PEERS = {
    "llama.cpp": "ssdevice.peers.llamacpp",
    "genai": "ssdevice.peers.genai",
    "transformers": "ssdevice.peers.hf",
}
"""The module of each peer by the name that a user knows it by."""


class UnavailableError(SSDeviceError):
    """An engine that cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Setup:
    """What every engine of a comparison is given.

    - ``model``: the Hugging Face folder. ``gguf``: the same weights for llama.cpp.
    - ``genai``: folder that keeps the models built for onnxruntime-genai, None to leave it out.
    - ``context``: most tokens of a prompt with its answer. ``stops``: ids that end an answer.
    - ``lookup``: how many tokens prompt lookup proposes, an arm for each.
    - ``sampling``: values of SAMPLING, empty for greedy decoding.
    - ``pythons``: interpreters by peer, where another than this one has its package.
    """

    model: Path
    gguf: Path
    genai: Path | None
    threads: int
    context: int
    stops: tuple[int, ...]
    lookup: tuple[int, ...]
    sampling: Mapping[str, float] = field(default_factory=dict)
    pythons: Mapping[str, str] = field(default_factory=dict)

    def settings(self, **more: Any) -> Json:
        """What a worker is told to open an engine: what all of them need, and ``more``."""
        return {
            "threads": self.threads,
            "context": self.context,
            "stops": list(self.stops),
            "sampling": dict(self.sampling),
            **more,
        }

    def python(self, peer: str) -> str:
        """The interpreter that has the package of a peer."""
        return self.pythons.get(peer, sys.executable)


@dataclass(frozen=True)
class Arm:
    """A row of the table: an engine and one way to decode with it.

    - ``module``: the peer's. ``settings``: for its ``open_engine``.
    - ``disk_bytes``: of the files that it needs.
    - ``plain``: the arm whose answers a speculative one must repeat, None if it is plain itself.
    - ``python``: the interpreter that runs it.
    - ``ours``: whether it is a bundle.
    """

    name: str
    module: str
    settings: Json
    disk_bytes: int
    plain: str | None = None
    python: str = sys.executable
    ours: bool = False


@dataclass(frozen=True)
class Skip:
    """An arm that is left out, and why."""

    name: str
    reason: str


Offers = Iterator[Arm | Skip]


def lookup_arms(peer: str, module: str, setup: Setup, disk_bytes: int, **settings: Any) -> Offers:
    """Plain decoding with a peer, and prompt lookup of each size.

    ``settings``: what all of them need beside the shared ones.
    """
    plain = Arm(
        name=f"{peer}, plain",
        module=module,
        settings=setup.settings(lookup=0, **settings),
        disk_bytes=disk_bytes,
        python=setup.python(peer),
    )
    yield plain
    for lookup in setup.lookup:
        yield replace(
            plain,
            name=f"{peer}, prompt lookup of {lookup}",
            settings=setup.settings(lookup=lookup, **settings),
            plain=plain.name,
        )


class Answer:
    """An answer and its times while it arrives. Its clock starts when the object is made.

    Tokens behind a stop token or ``max_tokens`` do not count. ``calls``: tokens that each call of
    the model gave; the first call is that of the prompt.
    """

    def __init__(self, max_tokens: int, stops: Collection[int]) -> None:
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.calls: list[int] = []
        self.ended = False
        self._stops = stops
        self._begin = perf_counter()
        self._first = self._begin
        self._last = self._begin

    def add(self, tokens: Sequence[int], same_call: bool = False) -> bool:
        """Add tokens that have just arrived; true at the end of the answer.

        ``same_call``: whether they are from the call that gave those before.
        """
        if self.ended:
            return True
        kept = list[int]()
        stopped = False
        for token in tokens[: self.max_tokens - len(self.tokens)]:
            kept.append(token)
            if token in self._stops:
                stopped = True
                break
        self.tokens += kept
        self._last = perf_counter()
        if same_call:
            self.calls[-1] += len(kept)
        else:
            self.calls.append(len(kept))
        if len(self.calls) == 1:
            self._first = self._last
        self.ended = stopped or len(self.tokens) >= self.max_tokens
        return self.ended

    def as_json(self) -> Json:
        """The fields of a ``Generation``; times are in seconds."""
        return {
            "tokens": self.tokens,
            "accepted": self.calls[1:],
            "prefill_seconds": self._first - self._begin,
            "decode_seconds": self._last - self._first,
        }


class Engine(Protocol):
    """A model in memory.

    ``version``: of its package. ``weights``: how they are stored, in the engine's own words.
    """

    version: str
    weights: str

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        """Decode from an empty cache until ``answer`` has ended."""
