"""The noise of sampling: a pure function of seed, position and token id, in every host language.

A token is sampled by the Gumbel-max trick: the largest of ``z + gumbel``, where ``gumbel = -log(e)`` and ``e`` is
exponentially distributed. Uniform numbers come from Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"), whose key is the seed and whose counter is (number, position, kind, 0):

- kind 0, number g: words 0 and 1 give ``e`` of the luckiest of the tokens ``256 g .. 256 g + 255``, an exponential
  number divided by 256; word 2 modulo 256 says which of them that is;
- kind 1, number ``i >> 1``: words ``2 (i & 1)`` and the next give how much more every other token i of a group has.

The smallest of 256 exponential numbers and what the others exceed it by are independent and exponentially distributed,
so this is one independent number for every token; but the best token of a row is found without computing them all.
Two words w, v make the uniform number ``(w * 2^20 + (v >> 12) + 1/2) / 2^52``, which is exact in float64, and ``-log``
of it an exponential one, in float64. A score plus its noise is a float64, too.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

GROUP = 256
"""Tokens whose smallest exponential number is known without the others."""
SEEDS = 1 << 64
AHEAD = 16
"""Positions whose groups are computed at once, which takes NumPy little longer than those of one."""

LEAST = -4.0
"""No noise is below, as -log(37) is not: 52 bits make no exponential number above 36.8."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(numbers: NDArray[np.uint64], positions: NDArray[np.uint64], kind: int, seed: int) -> NDArray[np.uint64]:
    """``[n], [n] -> [4, n]``: the 32-bit words of Philox 4x32-10 for counters (number, position, kind, 0)."""
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in: two rows of each.
    even = np.stack([numbers, np.full_like(numbers, kind)])
    odd = np.stack([positions, np.zeros_like(positions)])
    key = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], np.uint64)
    for _ in range(10):
        product = even * _MULTIPLIERS
        even, odd = (product >> _HIGH)[::-1] ^ odd ^ key, (product & _LOW)[::-1]
        key = (key + _WEYL) & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def exponential(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> Floats:
    """Exponential numbers of two words each."""
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return -np.log((bits.astype(np.float64) + 0.5) * 2.0**-52)


@lru_cache(maxsize=8)
def _block(seed: int, first: int, groups: int) -> tuple[Floats, Integers]:
    """``[AHEAD, groups]`` twice: the smallest number of each group, and the token that has it, from ``first`` on."""
    numbers = np.tile(np.arange(groups, dtype=np.uint64), AHEAD)
    positions = np.repeat(np.arange(first, first + AHEAD, dtype=np.uint64), groups)
    words = philox(numbers, positions, 0, seed)
    tokens = numbers.astype(np.int64) * GROUP + (words[2] % np.uint64(GROUP)).astype(np.int64)
    return (exponential(words[0], words[1]) / GROUP).reshape(AHEAD, groups), tokens.reshape(AHEAD, groups)


def _groups(seed: int, position: int, vocab: int) -> tuple[Floats, Integers]:
    """``[groups]`` twice: the smallest number of each group at a position, and the token that has it."""
    first = position - position % AHEAD
    smallest, lucky = _block(seed, first, -(-vocab // GROUP))
    return smallest[position - first], lucky[position - first]


def gumbel(seed: int, position: int, ids: Integers, vocab: int) -> Floats:
    """The noise of tokens ``ids [n]`` at a position."""
    smallest, lucky = _groups(seed, position, vocab)
    group = ids // GROUP
    words = philox((ids >> 1).astype(np.uint64), np.full(ids.shape, position, np.uint64), 1, seed)
    odd = (ids & 1).astype(bool)
    more = exponential(np.where(odd, words[2], words[0]), np.where(odd, words[3], words[1]))
    return -np.log(smallest[group] + np.where(lucky[group] == ids, 0.0, more))


def sample(scores: NDArray[np.float32], ids: Integers | None, seed: int, position: int, vocab: int) -> int:
    """The token with the largest score plus noise; ties go to the lowest id.

    ``scores [n]``: logits divided by the temperature, ``-inf`` for what must not be chosen; of tokens ``ids [n]`` in
    ascending order, None: of all ``vocab``.
    """
    if ids is None:
        ids = _hopeful(scores, seed, position)
        scores = scores[ids]
    total = scores.astype(np.float64) + gumbel(seed, position, ids, vocab)
    return int(ids[int(np.argmax(total))])


def _hopeful(scores: NDArray[np.float32], seed: int, position: int) -> Integers:
    """The ids of tokens that would have the largest sum, were the noise of each the largest of its group."""
    smallest, lucky = _groups(seed, position, len(scores))
    size = len(smallest) * GROUP
    rows = scores if len(scores) == size else np.concatenate([scores, np.full(size - len(scores), -np.inf, np.float32)])
    most = -np.log(smallest)
    reached = max(np.max(rows[lucky] + most), np.max(scores) + LEAST) - 1e-6  # by one token of each group, or the best
    groups = np.flatnonzero(np.max(rows.reshape(-1, GROUP), axis=1) + most >= reached)
    row, place = np.nonzero(rows.reshape(-1, GROUP)[groups] + most[groups, None] >= reached)
    return groups[row] * GROUP + place
