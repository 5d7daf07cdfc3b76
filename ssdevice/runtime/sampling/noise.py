"""The noise of sampling: a pure function of seed, position and token id, in every host language.

A token is sampled by the Gumbel-max trick: the largest of ``z + gumbel``, where ``gumbel =
-log(e)`` and ``e`` is exponentially distributed. Uniform numbers come from Philox 4x32-10 (Salmon
et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), whose key is the seed and whose counter
is (number, position, kind, 0):

- kind 0, number g: words 0 and 1 give ``e`` of the luckiest of the tokens ``256 g .. 256 g + 255``,
  an exponential number divided by 256; word 2 modulo 256 says which of them that is;
- kind 1, number ``i >> 1``: words ``2 (i & 1)`` and the next give how much more every other token i
  of a group has.

The smallest of 256 exponential numbers and what the others exceed it by are independent and
exponentially distributed, so every token has an independent number; but the best token of a row is
found without computing them all. Two words w, v make the uniform number ``(w * 2^20 + (v >> 12) +
1/2) / 2^52``, exact in float64; ``-log`` of it is exponential. A score plus its noise is a float64,
too.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP = 256
"""Tokens whose smallest exponential number is known without the others."""
SEEDS = 1 << 64
SLACK = 1e-5
"""More than rounding changes of a score."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Scores = NDArray[np.float32]

LOW = 0xFFFFFFFF


def philox(number: Any, position: Any, kind: int, seed: int) -> tuple[Any, Any, Any, Any]:
    """The 32-bit words of Philox 4x32-10 for counters (number, position, kind, 0): integers, or
    arrays of uint64.
    """
    a = number
    b = position
    c = kind
    d = 0
    for i in range(10):
        k = (seed + i * 0x9E3779B9) & LOW
        m = ((seed >> 32) + i * 0xBB67AE85) & LOW
        p = a * 0xD2511F53
        q = c * 0xCD9E8D57
        a, b, c, d = q >> 32 ^ b ^ k, q & LOW, p >> 32 ^ d ^ m, p & LOW
    return a, b, c, d


def exponential(high: Any, low: Any) -> Any:
    """Exponential numbers of two words each, in float64."""
    return -np.log(((high << 20 | low >> 12) + 0.5) * 2.0**-52)


@lru_cache(maxsize=8)
def _groups(seed: int, position: int, vocab: int) -> tuple[Floats, Floats, Integers]:
    """``[groups]`` each, at a position: the smallest number of a group, its noise, its token."""
    numbers = np.arange(-(-vocab // GROUP), dtype=np.uint64)
    high, low, which, _ = philox(numbers, position, 0, seed)
    smallest = exponential(high, low) / GROUP
    return smallest, -np.log(smallest), (numbers * GROUP + (which & (GROUP - 1))).astype(np.int64)


def gumbel(seed: int, position: int, ids: Integers, vocab: int) -> Floats:
    """The noise of tokens ``ids [n]`` at a position."""
    smallest, _, lucky = _groups(seed, position, vocab)
    group = ids // GROUP
    words = philox((ids >> 1).astype(np.uint64), position, 1, seed)
    odd = (ids & 1).astype(bool)
    more = exponential(np.where(odd, words[2], words[0]), np.where(odd, words[3], words[1]))
    noise: Floats = -np.log(smallest[group] + np.where(lucky[group] == ids, 0.0, more))
    return noise


def sample(scores: Scores, ids: Integers, seed: int, position: int, vocab: int) -> int:
    """The token of ``ids [n]`` (ascending) with the largest ``scores [n]`` plus noise; ties go to
    the lowest id.

    ``scores``: logits divided by the temperature, ``-inf`` for what must not be chosen.
    """
    return int(ids[np.argmax(scores + gumbel(seed, position, ids, vocab))])


def sample_all(logits: Scores, top: int, temperature: float, seed: int, position: int) -> int:
    """``sample`` of all tokens of ``logits [V]`` divided by the temperature; ``top``: the likeliest
    of them.

    The noise is computed for the likeliest token, and for those that could win over it with the
    luck of their group.
    """
    vocab = len(logits)
    t = np.float32(temperature)
    group = top // GROUP
    smallest, luck, lucky = _groups(seed, position, vocab)
    more = 0.0
    if lucky[group] != top:
        words = philox(top >> 1, int(position), 1, seed)
        at = 2 * (top & 1)
        more = exponential(words[at], words[at + 1])
    floor = (logits[top] / t - np.log(smallest[group] + more) - luck) * temperature
    floor = (floor - SLACK * (1 + np.abs(floor))).astype(np.float32)
    whole = vocab // GROUP
    ids = np.flatnonzero(logits[: whole * GROUP].reshape(whole, GROUP) >= floor[:whole, None])
    if vocab % GROUP:
        last = np.flatnonzero(logits[whole * GROUP :] >= floor[whole])
        ids = np.append(ids, whole * GROUP + last)
    return sample(logits[ids] / t, ids, seed, position, vocab)
