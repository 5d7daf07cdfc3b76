"""Acceptance of drafts: how many tokens steps emitted, and how often each stream and rank held the true token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ssdevice.runtime.generation import Drafts


@dataclass
class Acceptance:
    """Counts over steps. A draft is judged by the answer itself, whether or not its step got that far.

    ``held``: (stream, rank) -> how often that candidate was the true token; streams count from 1. ``judged``: stream ->
    how often the answer was long enough to tell. ``emitted``: tokens of a step, after truncation -> number of steps.
    """

    held: Counter[tuple[int, int]] = field(default_factory=Counter)
    judged: Counter[int] = field(default_factory=Counter)
    emitted: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: Sequence[int], steps: Sequence[tuple[Drafts, int]]) -> None:
        """Count one answer: its ``tokens``, and the drafts and number of tokens of each step."""
        at = 1  # the first token came from prefill
        for drafts, count in steps:
            self.emitted[count] += 1
            for stream, candidates in enumerate(drafts, 1):
                if at + stream > len(tokens):
                    break
                self.judged[stream] += 1
                true = tokens[at + stream - 1]
                rank = next((r for r, token in enumerate(candidates) if token == true), None)
                if rank is not None:
                    self.held[stream, rank] += 1
            at += count

    def histogram(self, emitted: int) -> list[int]:
        """Number of steps that emitted 1, 2, .. ``emitted`` tokens."""
        return [self.emitted[n] for n in range(1, emitted + 1)]

    def table(self, gamma: int, k: int) -> list[list[float]]:
        """``[γ, k]`` shares: how often candidate r of stream j was the true token; 0 where nothing was judged."""
        return [
            [self.held[stream, rank] / max(self.judged[stream], 1) for rank in range(k)]
            for stream in range(1, gamma + 1)
        ]
