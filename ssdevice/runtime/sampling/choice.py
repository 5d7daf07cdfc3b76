"""The choice of a token from a row of logits, and of a path through a draft tree from the rows of
its nodes.

A choice is a pure function of the text before it, the row's logits, and the seed. So a draft only
decides whether the token after next is known already, never which token is chosen.
"""

import math
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.sampling.noise import Integers, Scores, sample, sample_all
from ssdevice.runtime.sampling.options import Processors, Sampling
from ssdevice.runtime.sampling.structure import Grammar
from ssdevice.tree import Tree


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the model's own logits: of the chosen token, and of the likeliest ``ids
    [n]``, fewer than asked for where the model rules out the others.
    """

    chosen: float
    ids: tuple[int, ...]
    values: tuple[float, ...]


NEAR = 1e-5
"""More than rounding changes of a score or a probability."""
MUCH = 1e4
"""More surprise than that of any possible token."""
TIE = 1e-12
"""Surprises are as far from the entropy if they differ by less: it is a sum, which is rounded
differently in another order.
"""
NO_NUMBERS = -1
"""Instead of a token: a score is NaN, or the best one is not finite."""
NO_TOKEN = -2
"""Instead of a token: all scores are -infinity."""


class Compiled:
    """The choice of a token by the kernels' library (``native``), for one answer; rows are
    contiguous in memory.

    It agrees with ``choose``, except perhaps for scores or sums closer than 1e-12.
    """

    def __init__(self, library: Any, s: Sampling) -> None:
        self._choose = library.ssdevice_choose
        self._log_total = library.ssdevice_log_total
        self._choose.argtypes = [c_void_p, c_int64, *4 * [c_double], c_int64, c_uint64, c_int64]
        self._log_total.argtypes = [c_void_p, c_int64, c_void_p, c_int64]
        self._log_total.restype = c_double
        self._of_all = (s.temperature, 1.0, 0.0, 1.0, 0, s.seed)
        self._of_left = (s.temperature, s.top_p, s.min_p, s.typical_p, s.top_k, s.seed)

    def choose(self, scores: Scores, position: int, truncating: bool = True) -> int:
        """What ``choose`` returns."""
        draw = self._of_left if truncating else self._of_all
        return int(self._choose(scores.ctypes.data, len(scores), *draw, position))

    def log_total(self, logits: Scores, count: int) -> tuple[float, list[int]]:
        """The logarithm of the sum of ``exp(logits [V])``, and the likeliest ``ids [count]``, ties
        to the lowest; NaN if a logit is NaN or infinity.
        """
        ids = np.zeros(count, np.int32)
        total = self._log_total(logits.ctypes.data, len(logits), ids.ctypes.data, count)
        return total, ids.tolist()


class Chooser:
    """Chooses the tokens of one answer.

    ``logprobs``: of every token so far, if asked for. ``prompt``, ``stops``, ``vocab``: see
    ``Processors``. ``grammar``: of ``sampling.structure``. ``library``: the kernels' (``native``),
    for speed. ``source``: the bundle, for messages. Raises InputError for ids that the model does
    not have.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        stops: Sequence[int],
        vocab: int,
        grammar: Grammar | None = None,
        library: object = None,
        source: object = "the bundle",
    ) -> None:
        sampling.check_ids(vocab)
        self.sampling = sampling
        self._source = source
        self._processed = sampling.processed
        self._grammar = grammar
        self.logprobs: list[Logprobs] = []
        self._processors = Processors(sampling, prompt, stops, vocab)
        self._compiled = Compiled(library, sampling) if library is not None else None

    def forced(self) -> Sequence[int]:
        """The next tokens that the structure leaves no choice for."""
        return self._grammar.forced if self._grammar else ()

    def allows(self, token: int) -> bool:
        """Whether the structure, if there is one, lets a token come next."""
        return self._grammar is None or self._grammar.allows(token)

    def close(self) -> None:
        """The answer has ended."""
        if self._grammar is not None:
            self._grammar.close()

    def __call__(self, logits: Scores) -> int:
        """The token after the text so far, which it then belongs to; ``logits [V] float32``.

        A logit of -infinity rules a token out. Raises BundleError for logits that are not numbers,
        or of which the best score is not finite; InputError if every token is forbidden.
        """
        grammar = self._grammar
        scores = self._processors(logits) if self._processed else logits
        best = self._best(scores, logits, unmasked=grammar is not None)
        if grammar is not None and (best is None or not grammar.allows(best)):
            best = self._best(grammar.masked(scores), logits)
        assert best is not None
        self._accept(logits, best)
        if grammar is not None:
            grammar.accept(best)
        return best

    def typical(
        self, tree: Tree, drafts: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> list[int]:
        """The path, root first, of the drafts that typical acceptance adds to the text; without it
        only the root.

        ``drafts [γ, k]``, ``logits [T, V]``. A draft is taken if its parent is, and its probability
        exceeds ``min(ε, sqrt(ε) exp(-entropy))`` of its parent's row. Of the longest paths the
        likeliest wins (2401.10774 section 2.3.1), then the lowest node.
        """
        s = self.sampling
        if not s.typical_acceptance:
            return [0]
        # node -> the logarithm of its path's probability; its token
        likely = {0: 0.0}
        held = drafted(tree, drafts)
        for parent in range(tree.size):
            children = [
                node for node in range(parent + 1, tree.size) if tree.parents[node] == parent
            ]
            if parent in likely and children:
                found, entropy = probabilities(logits[parent], [held[node] for node in children], s)
                least = min(
                    s.typical_acceptance, math.sqrt(s.typical_acceptance) * math.exp(-entropy)
                )
                own = zip(children, found, strict=True)
                likely |= {
                    node: likely[parent] + math.log(each) for node, each in own if each > least
                }
        best = max(likely, key=lambda node: (tree.depths[node], likely[node]))
        path = list(tree.path_table[best][: tree.depths[best] + 1])
        for parent, node in pairwise(path):
            self._accept(logits[parent], held[node])
        return path

    def _accept(self, logits: Scores, token: int) -> None:
        most = self.sampling.logprobs
        if most is not None:
            self.logprobs.append(self._log_probabilities(logits, token, min(most, len(logits))))
        self._processors.accept(token)

    def _best(self, scores: Scores, logits: Scores, unmasked: bool = False) -> int | None:
        """The token of a row of processed ``logits``.

        ``unmasked``: the mask of a structure, which takes longest to compute, is not applied yet.
        Then the result is None unless the choice is certain to be the same with it, provided that
        the mask allows the token.
        """
        s = self.sampling
        position = len(self._processors.ids)
        if self._compiled is not None:
            token = self._compiled.choose(scores, position, truncating=not unmasked)
        else:
            token = choose(scores, position, s, truncating=not unmasked)
        if token < 0:
            raise self._refusal(token, logits)
        if unmasked and s.temperature and s.truncates and not _stays(scores, token, s):
            return None
        return token

    def _refusal(self, reason: int, logits: Scores) -> InputError:
        """The error for a row of ``logits`` without a token: NO_NUMBERS or NO_TOKEN."""
        if reason == NO_TOKEN and np.any(logits != -np.inf):
            return InputError("the request forbids every token that the model could choose")
        return BundleError(
            f"{self._source}: the model returned logits that are not numbers, or too large to "
            "choose from; `ssdevice verify` tells whether the bundle is damaged"
        )

    def _log_probabilities(self, logits: Scores, token: int, best: int) -> Logprobs:
        """Those of a token and of the ``best`` likeliest ones, ties to the lowest id.

        Raises BundleError for logits that are not numbers.
        """
        if self._compiled is not None:
            total, likely = self._compiled.log_total(logits, best)
        else:
            with np.errstate(invalid="ignore"):  # of NaN and infinity there is no total
                total = float(np.logaddexp.reduce(logits, dtype=np.float64))
            some = np.flatnonzero(logits >= np.partition(logits, -max(best, 1))[-max(best, 1)])
            likely = some[np.argsort(-logits[some], kind="stable")][:best].tolist()
        if not math.isfinite(total):
            raise self._refusal(NO_NUMBERS, logits)
        ids = tuple(each for each in likely if logits[each] > -np.inf)
        return Logprobs(
            chosen=float(logits[token]) - total,
            ids=ids,
            values=tuple(float(logits[each]) - total for each in ids),
        )


def choose(scores: Scores, position: int, s: Sampling, truncating: bool = True) -> int:
    """The token at a position from processed logits ``[V]``, or NO_NUMBERS or NO_TOKEN.

    ``truncating``: whether top-k, top-p, min-p and typical-p leave tokens out. Nothing is drawn
    unless the best score is finite, also after the division by the temperature, which happens in
    float32: what overflows there to -infinity is never chosen.
    """
    top = int(np.argmax(scores))  # the first NaN, if there is one
    if np.isnan(scores[top]) or scores[top] == np.inf:
        return NO_NUMBERS
    if scores[top] == -np.inf:
        return NO_TOKEN
    if not s.temperature:
        return top
    temperature = np.float32(s.temperature)
    with np.errstate(over="ignore"):
        if not np.isfinite(scores[top] / temperature):
            return NO_NUMBERS
        best = sample_all(scores, top, s.temperature, s.seed, position)
        if not truncating or not s.truncates:
            return best
        left, ids = truncated(scores / temperature, s)
    if ids is None or best in ids:
        return best
    return sample(left, ids, s.seed, position, len(scores))


def truncated(scores: Scores, s: Sampling) -> tuple[Scores, Integers | None]:
    """The scores that top-k, top-p, min-p and typical-p leave, and their ids ascending; None: all
    are left.
    """
    ids: Integers | None = None

    def keep(at: Integers) -> None:
        nonlocal scores, ids
        scores = scores[at]
        ids = at if ids is None else ids[at]

    if 0 < s.top_k < len(scores):
        keep(np.flatnonzero(scores >= np.partition(scores, -s.top_k)[-s.top_k]))
    if s.top_p < 1:
        keep(_nucleus(scores, s.top_p))
    if s.min_p > 0:
        keep(np.flatnonzero(scores >= np.float64(np.max(scores)) + math.log(s.min_p)))
    if s.typical_p < 1:
        keep(_typical(scores, s.typical_p))
    return scores, ids


def probabilities(logits: Scores, ids: Sequence[int], s: Sampling) -> tuple[list[float], float]:
    """Those of ``ids`` when sampling from processed ``logits [V]``, and the entropy of all in nats;
    all are NaN where there is none, because the best score is not finite.
    """
    with np.errstate(over="ignore"):
        scores = logits / np.float32(s.temperature)
    if not np.isfinite(np.max(scores)):
        return [math.nan] * len(ids), math.nan
    below, kept = truncated(scores, s)
    below -= np.max(below)
    np.maximum(below, np.float32(-MUCH), out=below)
    weight = np.exp(below)
    total = float(np.sum(weight))
    if kept is None:
        found = [float(weight[i]) / total for i in ids]
    else:
        found = [float(np.sum(weight[kept == i])) / total for i in ids]
    return found, math.log(total) - float(weight @ below) / total


def _stays(logits: Scores, token: int, s: Sampling) -> bool:
    """Whether truncation keeps a token whichever others a structure excludes."""
    scores = logits[logits >= logits[token]] / np.float32(s.temperature)
    p = weights(scores, np.max(scores))
    mine = np.min(p)
    all_of_these = np.sum(p)
    return not (
        s.typical_p < 1
        or mine < s.min_p * (1 + NEAR)
        or 0 < s.top_k < len(p)
        or (s.top_p < 1 and all_of_these - mine >= (s.top_p - NEAR) * all_of_these)
    )


def weights(scores: Scores, highest: np.float32) -> NDArray[np.float64]:
    """What tokens of ``scores [n] float32`` weigh, ``[n]``, before they are normalized: exp(score -
    ``highest``).
    """
    found: NDArray[np.float64] = np.exp(scores.astype(np.float64) - float(highest))
    return found


def _nucleus(scores: Scores, mass: float) -> Integers:
    """The likeliest tokens that have ``mass`` together, ids ascending."""
    weight = weights(scores, np.max(scores))
    total = float(np.sum(weight))
    # All others have less than 1 - mass together.
    likely = np.flatnonzero(weight >= (1 - mass) * total / len(weight))
    # By scores: weights of different ones may be equal.
    order = likely[np.argsort(-scores[likely], kind="stable")]
    return np.sort(order[: 1 + int(np.searchsorted(np.cumsum(weight[order]), mass * total))])


def _typical(scores: Scores, mass: float) -> Integers:
    """The tokens whose surprise is nearest to the entropy and that have ``mass`` together
    (2202.00666).
    """
    below = np.maximum(scores.astype(np.float64) - float(np.max(scores)), -MUCH)
    weight = np.exp(below)
    total = np.sum(weight)
    # Surprises differ from the entropy by as much as these from their mean.
    far = np.abs(below - np.sum(weight * below) / total)
    order = np.argsort(far)
    last = min(int(np.searchsorted(np.cumsum(weight[order] / total), mass)), len(order) - 1)
    return np.flatnonzero(far <= far[order[last]] + TIE)


def walk(
    tree: Tree, drafts: NDArray[np.int32], choose: Callable[[int], int], taken: Sequence[int] = (0,)
) -> tuple[list[int], list[int]]:
    """The path through a tree of drafts ``[γ, k]``, root first, and the tokens that its nodes emit.

    ``choose``: the token after a node. The path goes on to the lowest child that holds it, and ends
    where none does. ``taken``: how the path begins, whatever is chosen.
    """
    path = list(taken)
    held = drafted(tree, drafts)
    tokens = [held[node] for node in path[1:]]
    while True:
        tokens.append(choose(path[-1]))
        entered = [
            node
            for node in range(path[-1] + 1, tree.size)
            if tree.parents[node] == path[-1] and held[node] == tokens[-1]
        ]
        if not entered:
            return path, tokens
        path.append(entered[0])


def drafted(tree: Tree, drafts: NDArray[np.int32]) -> list[int]:
    """The token that each node of a tree has in ``drafts [γ, k]``; -1 for the root."""
    return [-1, *(int(drafts[len(ranks) - 1, ranks[-1]]) for ranks in tree.paths[1:])]
