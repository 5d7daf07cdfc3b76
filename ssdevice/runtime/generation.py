"""An answer: its tokens, how many each step emitted, and its times."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ssdevice.runtime.sampling.choice import Logprobs
from ssdevice.tree import Ranks, Tree

Drafts = Sequence[Sequence[int]]
"""``[γ, k]`` candidates by stream."""


class Reason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    CANCELLED = "cancelled"


def accepted_path(tree: Tree, drafts: Drafts, run: Sequence[int]) -> Ranks:
    """The rank path of the accepted drafts in ``run``, a step's tokens.

    It leads to the deepest node whose tokens begin the run. It is one shorter than the run, unless
    the run was truncated within accepted drafts.
    """
    accepted: Ranks = ()
    for path in tree.paths:
        if len(accepted) < len(path) <= len(run):
            tokens = [drafts[depth][rank] for depth, rank in enumerate(path)]
            if tokens == list(run[: len(path)]):
                accepted = path
    return accepted


def emitted_nodes(tree: Tree, drafts: Drafts, tokens: Sequence[int]) -> list[int]:
    """The tree nodes whose rows decided a step's tokens, from the root on.

    ``drafts``: the step's input.
    """
    path = accepted_path(tree, drafts, tokens[:-1])
    return [tree.paths.index(path[:depth]) for depth in range(len(path) + 1)]


@dataclass
class Run:
    """What one target call added to an answer.

    ``text``: the part of the answer's text that can no longer change since.
    ``reason``: why the answer ends here; None if it continues.
    ``drafts [γ, k]``: the verified candidates; None for prefill and for plain decoding.
    """

    tokens: tuple[int, ...]
    text: str
    reason: Reason | None = None
    drafts: NDArray[np.int32] | None = None


@dataclass
class Generation:
    """An answer so far. Times are in seconds and exclude the caller's work between pieces.

    ``tokens``: including a stop token; the first comes from prefill.
    ``accepted``: tokens of each step after truncation, so ``sum(accepted) == len(tokens) - 1``.
    ``prefill_seconds``: until the first token (TTFT).
    ``native_seconds``: the part of ``decode_seconds`` inside the target's runtime.
    ``reason``: None while it runs.
    ``logprobs``: those of each token, if they were asked for.
    ``dropped``: the oldest turns that the conversation lost, so that it fits the context.
    ``cached_tokens``: those of the prompt that were not computed again.
    ``inexact``: typical acceptance may have changed the tokens.
    ``continues``: the text goes on where the prompt's ends, with the space that a first word
    would lose otherwise.
    ``alone``: tokens that no server verified, because it did not answer.
    ``thinking``: whether the prompt began a thought; only ``serve`` says so.
    """

    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    native_seconds: float = 0.0
    reason: Reason | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    dropped: int = 0
    cached_tokens: int = 0
    inexact: bool = False
    continues: bool = False
    alone: int = 0
    thinking: bool = False

    def add(self, run: Run, seconds: float, native_seconds: float) -> None:
        """Add a run and the time of its call; the first run is that of prefill."""
        if self.tokens:
            self.accepted.append(len(run.tokens))
            self.decode_seconds += seconds
            self.native_seconds += native_seconds
        else:
            self.prefill_seconds = seconds
        self.tokens.extend(run.tokens)
        self.text += run.text
        self.reason = run.reason

    @classmethod
    def total(cls, answers: "Sequence[Generation]") -> Self:
        """Several answers as one: their counts and times together, without texts and tokens."""
        found = cls(sum(each.prompt_tokens for each in answers))
        for each in answers:
            found.accepted += each.accepted
            found.prefill_seconds += each.prefill_seconds
            found.decode_seconds += each.decode_seconds
            found.native_seconds += each.native_seconds
        return found

    @property
    def steps(self) -> int:
        """Target calls after prefill."""
        return len(self.accepted)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_step(self) -> float:
        """β: tokens emitted by steps over steps, without prefill's token. 0 without steps."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed without prefill. 0 without steps."""
        return sum(self.accepted) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def host_us_per_step(self) -> float:
        """Microseconds of a step outside the target's runtime: the loop, the cache and the text.

        0 without steps.
        """
        if not self.accepted:
            return 0.0
        return (self.decode_seconds - self.native_seconds) / len(self.accepted) * 1e6
