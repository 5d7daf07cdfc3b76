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
    [n]``.
    """

    chosen: float
    ids: tuple[int, ...]
    values: tuple[float, ...]


NEAR = 1e-5
"""More than rounding changes of a score or a probability."""
MUCH = 1e4
"""More surprise than that of any possible token."""


class Compiled:
    """The choice of a token by the kernels' library (``native``), for one answer; rows are
    contiguous in memory.

    It agrees with NumPy here, except perhaps for scores or sums closer than 1e-12.
    """

    def __init__(self, library: Any, s: Sampling) -> None:
        self._choose = library.ssdevice_choose
        self._log_total = library.ssdevice_log_total
        self._choose.argtypes = [c_void_p, c_int64, *4 * [c_double], c_int64, c_uint64, c_int64]
        self._log_total.argtypes = [c_void_p, c_int64, c_void_p, c_int64]
        self._log_total.restype = c_double
        whole = s.temperature, 1.0, 0.0, 1.0, 0, s.seed
        self._draws = whole, (s.temperature, s.top_p, s.min_p, s.typical_p, s.top_k, s.seed)

    def choose(self, scores: Scores, position: int, truncated: bool = True) -> int:
        """The token at a position from processed logits ``[V]``; negative if they have none, or are
        not numbers.
        """
        return int(self._choose(scores.ctypes.data, len(scores), *self._draws[truncated], position))

    def log_total(self, logits: Scores, count: int) -> tuple[float, list[int]]:
        """The logarithm of the sum of ``exp(logits [V])``, and the likeliest ``ids [count]``, ties
        to the lowest.
        """
        ids = np.zeros(count, np.int32)
        return self._log_total(
            logits.ctypes.data, len(logits), ids.ctypes.data, count
        ), ids.tolist()


class Chooser:
    """Chooses the tokens of one answer.

    ``logprobs``: of every token so far, if asked for. ``prompt``, ``stops``, ``vocab``: see
    ``Processors``. ``grammar``: of ``sampling.structure``. ``library``: the kernels' (``native``),
    for speed. Raises InputError for ids that the model does not have.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        stops: Sequence[int],
        vocab: int,
        grammar: Grammar | None = None,
        library: object = None,
    ) -> None:
        sampling.check_ids(vocab)
        self.sampling = sampling
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

    def __call__(self, logits: Scores) -> int:
        """The token after the text so far, which it then belongs to; ``logits [V] float32``.

        Raises BundleError for logits with NaN, InputError if every token is forbidden.
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
        if not (s := self.sampling).typical_acceptance:
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
        if (most := self.sampling.logprobs) is not None:
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
        found = (
            self._compiled.choose(scores, position, truncated=not unmasked)
            if self._compiled is not None
            else -1
        )
        if found >= 0 and not (unmasked and s.truncates):
            return found
        top = int(np.argmax(scores))
        if not np.isfinite(scores[top]):
            if np.isnan(scores[top]) or not np.isfinite(np.max(logits)):
                raise BundleError("the model returned logits that are not numbers")
            raise InputError("the request forbids every token that the model could choose")
        if not s.temperature:
            return top
        best = found if found >= 0 else sample_all(scores, top, s.temperature, s.seed, position)
        if unmasked:
            return best if _stays(scores, top, best, s) else None
        scores, kept = truncated(scores / np.float32(s.temperature), s)
        return (
            best
            if kept is None or best in kept
            else sample(scores, kept, s.seed, position, len(logits))
        )

    def _log_probabilities(self, logits: Scores, token: int, best: int) -> Logprobs:
        """Those of a token and of the ``best`` likeliest ones, ties to the lowest id."""
        if self._compiled is not None:
            total, likely = self._compiled.log_total(logits, best)
        else:
            total = float(np.logaddexp.reduce(logits, dtype=np.float64))
            some = np.flatnonzero(logits >= np.partition(logits, -max(best, 1))[-max(best, 1)])
            likely = some[np.argsort(-logits[some], kind="stable")][:best].tolist()
        return Logprobs(
            float(logits[token]) - total,
            tuple(likely),
            tuple(float(logits[i]) - total for i in likely),
        )


def truncated(scores: Scores, s: Sampling) -> tuple[Scores, Integers | None]:
    """The scores that top-k, top-p, min-p and typical-p leave, and their ids ascending; None: all
    are left.
    """
    ids: Integers | None = None

    def keep(at: Integers) -> None:
        nonlocal scores, ids
        scores, ids = scores[at], at if ids is None else ids[at]

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
    NaN gives NaN.
    """
    below, kept = truncated(logits / np.float32(s.temperature), s)
    below -= np.max(below)
    np.maximum(below, np.float32(-MUCH), out=below)
    weight = np.exp(below)
    total = float(np.sum(weight))
    found = [float(weight[i] if kept is None else np.sum(weight[kept == i])) / total for i in ids]
    return found, math.log(total) - float(weight @ below) / total


def _stays(logits: Scores, top: int, token: int, s: Sampling) -> bool:
    """Whether truncation keeps a token whichever others a structure excludes.

    ``top``: the likeliest token.
    """
    p = weights(
        logits[logits >= logits[token]] / np.float32(s.temperature),
        logits[top] / np.float32(s.temperature),
    )
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
    likely = np.flatnonzero(
        weight >= (1 - mass) * total / len(weight)
    )  # all others have less than 1 - mass together
    order = likely[np.argsort(-weight[likely], kind="stable")]
    return np.sort(order[: 1 + int(np.searchsorted(np.cumsum(weight[order]), mass * total))])


def _typical(scores: Scores, mass: float) -> Integers:
    """The tokens whose surprise is nearest to the entropy and that have ``mass`` together
    (2202.00666).
    """
    below = np.maximum(scores.astype(np.float64) - float(np.max(scores)), -MUCH)
    weight = np.exp(below)
    total = np.sum(weight)
    far = np.abs(
        below - np.sum(weight * below) / total
    )  # of surprises and the entropy, these have the differences
    order = np.argsort(far)
    last = min(int(np.searchsorted(np.cumsum(weight[order] / total), mass)), len(order) - 1)
    return np.flatnonzero(far <= far[order[last]])


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
        children = (
            node for node in range(path[-1] + 1, tree.size) if tree.parents[node] == path[-1]
        )
        if (child := next((node for node in children if held[node] == tokens[-1]), None)) is None:
            return path, tokens
        path.append(child)


def drafted(tree: Tree, drafts: NDArray[np.int32]) -> list[int]:
    """The token that each node of a tree has in ``drafts [γ, k]``; -1 for the root."""
    return [-1, *(int(drafts[len(ranks) - 1, ranks[-1]]) for ranks in tree.paths[1:])]
