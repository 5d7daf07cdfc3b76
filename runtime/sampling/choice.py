"""The choice of a token from a row of logits, and of a path through a draft tree from the rows of its nodes.

A choice is a pure function of the text before it, the row's logits, and the seed. So a draft only decides whether the
token after next is known already, never which token is chosen.

Hosts in other languages choose the same tokens, so precisions are part of the definition. Processors and the division
by the temperature are in float32, rounded after every operation. All that follows is in float64, of float32 scores z
whose largest is h: a token weighs exp(z - h); top-p keeps the fewest likeliest tokens (of equal ones those with the
lowest ids) that weigh ``top_p`` times the sum of all or more; min-p keeps z >= h + log(min_p). Libraries' exp and log
differ in the last bit: a choice can differ only where two sums are that close.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.sampling.noise import Integers, sample
from ssdevice.runtime.sampling.options import Sampling, Scores
from ssdevice.runtime.sampling.processors import Processors
from ssdevice.runtime.structure.grammar import Grammar
from ssdevice.tree import Tree


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the model's own logits: of the chosen token, and of the likeliest ``ids [n]``."""

    chosen: float
    ids: tuple[int, ...]
    values: tuple[float, ...]


class Chooser:
    """Chooses the tokens of one answer. ``logprobs``: those of every token chosen so far, if asked for.

    ``prompt``, ``stops`` and ``vocab``: as in ``Processors``. ``grammar``: that of ``sampling.structure``. Raises
    InputError for ids that the model does not have.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        stops: Sequence[int],
        vocab: int,
        grammar: Grammar | None = None,
    ) -> None:
        sampling.check_ids(vocab)
        self.sampling = sampling
        self.logprobs: list[Logprobs] = []
        self._vocab = vocab
        self._processors = Processors(sampling, prompt, stops, vocab)
        self._position = len(prompt)
        self._grammar = grammar

    def forced(self) -> Sequence[int]:
        """The tokens that the structure leaves no choice for, in turn from the next one on."""
        return self._grammar.forced if self._grammar else ()

    def __call__(self, logits: Scores) -> int:
        """The token after the text so far, which it then belongs to; ``logits [V] float32``.

        Raises BundleError for logits with NaN, InputError if every token is forbidden.
        """
        s = self.sampling
        scores = self._processors(logits) if s.processed else logits
        if self._grammar:
            scores = self._grammar.masked(scores)
        best = int(np.argmax(scores))
        highest = scores[best]
        if not np.isfinite(highest):
            if np.isnan(highest) or not np.isfinite(np.max(logits)):
                raise BundleError("the model returned logits that are not numbers")
            raise InputError("the request forbids every token that the model could choose")
        if s.temperature:
            kept, ids = truncated(scores / np.float32(s.temperature), s)
            best = sample(kept, ids, s.seed, self._position, self._vocab)
        if s.logprobs is not None:
            self.logprobs.append(log_probabilities(logits, best, s.logprobs))
        self._processors.accept(best)
        if self._grammar:
            self._grammar.accept(best)
        self._position += 1
        return best


def truncated(scores: Scores, s: Sampling) -> tuple[Scores, Integers | None]:
    """The scores that top-k, top-p, min-p and typical-p leave, and their ids ascending; None: all are left."""
    ids: Integers | None = None

    def keep(at: Integers) -> None:
        nonlocal scores, ids
        scores, ids = scores[at], at if ids is None else ids[at]

    if 0 < s.top_k < len(scores):
        keep(np.flatnonzero(scores >= _largest(scores, s.top_k)))
    if s.top_p < 1:
        keep(_nucleus(scores, s.top_p))
    if s.min_p > 0:
        keep(np.flatnonzero(scores >= _above(float(np.max(scores)) + math.log(s.min_p))))
    if s.typical_p < 1:
        keep(_typical(scores, s.typical_p))
    return scores, ids


def weights(scores: Scores, highest: np.float32) -> NDArray[np.float64]:
    """What tokens weigh, the one of the ``highest`` score 1."""
    found: NDArray[np.float64] = np.exp(scores.astype(np.float64) - float(highest))
    return found


def _above(bound: float) -> np.float32:
    """The least float32 that is not below a bound: comparing scores with it costs no conversion of them."""
    found = np.float32(bound)
    return found if float(found) >= bound else np.nextafter(found, np.float32(np.inf))


def _nucleus(scores: Scores, mass: float) -> Integers:
    """The likeliest tokens that have ``mass`` together, ids ascending."""
    highest = np.max(scores)
    total = float(np.sum(np.exp(scores - highest)))  # in float32, which nearly always decides
    # All tokens below this bound together have less than 1 - mass.
    likely = np.flatnonzero(scores > highest + np.float32(math.log((1 - mass) / len(scores) * total) - 1e-3))
    falling = likely[np.argsort(-scores[likely], kind="stable")]
    reached = np.cumsum(weights(scores[falling], highest))
    last = int(np.searchsorted(reached, mass * total))
    if np.min(np.abs(reached[max(last - 1, 0) : last + 1] - mass * total), initial=np.inf) < 1e-5 * total:
        last = int(np.searchsorted(reached, mass * float(np.sum(weights(scores, highest)))))
    return np.sort(falling[: 1 + last])


def _largest(scores: Scores, n: int) -> np.float32:
    """The n-th largest score."""
    found: np.float32 = np.partition(scores, len(scores) - n)[len(scores) - n]
    return found


def _typical(scores: Scores, mass: float) -> Integers:
    """The tokens whose surprise is nearest to the entropy and that have ``mass`` together (2202.00666)."""
    highest = np.max(scores)
    weight = weights(scores, highest)
    possible = np.flatnonzero(weight)
    total = np.sum(weight)
    q = weight[possible] / total
    surprise = np.log(total) + float(highest) - scores[possible]
    far = np.abs(surprise - np.sum(q * surprise))
    order = np.argsort(far)
    last = min(int(np.searchsorted(np.cumsum(q[order]), mass)), len(q) - 1)
    near: Integers = possible[far <= far[order[last]]]
    return near


def log_probabilities(logits: Scores, token: int, best: int) -> Logprobs:
    """The log-probabilities of a token and of the ``best`` likeliest ones, ties to the lowest id."""
    highest = np.max(logits)
    total = float(highest) + float(np.log(np.sum(np.exp(logits - highest), dtype=np.float64)))
    likely = np.flatnonzero(logits >= _largest(logits, min(best, len(logits)))).tolist() if best else []
    ids = sorted(likely, key=lambda i: (-logits[i], i))[:best]
    return Logprobs(float(logits[token]) - total, tuple(ids), tuple(float(logits[i]) - total for i in ids))


def walk(tree: Tree, drafts: NDArray[np.int32], choose: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """The path through a tree of drafts ``[γ, k]``, root first, and the tokens that its nodes emit.

    ``choose``: the token after a node. A child that holds it is entered (the lowest node first); where none does, the
    token is emitted and the path ends.
    """
    path, tokens = [0], []
    while True:
        token = choose(path[-1])
        tokens.append(token)
        ranks = tree.paths[path[-1]]
        children = (
            node
            for node in range(path[-1] + 1, tree.size)
            if tree.paths[node][:-1] == ranks and drafts[len(ranks), tree.paths[node][-1]] == token
        )
        child = next(children, None)
        if child is None:
            return path, tokens
        path.append(child)
