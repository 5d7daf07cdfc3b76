"""Phrases that a model says often: after two to four tokens, the one that mostly follows them in
its own answers.

The table has 2**n entries of 32 bits in little-endian order, each at the hash of a phrase: in the
low bits the token that follows, plus one (0: no entry); above it bits of another hash, by which
most other phrases are told apart. A wrong token costs a draft, never an answer.

``ssdevice.export.phrases`` makes the table. llama.cpp's ``lookup`` has static n-grams beside those
of the text, too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ssdevice.bundle.integrity import read_bounded
from ssdevice.errors import BundleError

ROLE = "phrases"
FILE = "phrases.bin"
FEWEST = 2
MOST = 4
"""Tokens of a phrase before the one that follows."""
LARGEST = 17
"""n at most: half a megabyte."""
MASK = (1 << 32) - 1

Hash = TypeVar("Hash", int, NDArray[np.int64])


def mixed(state: Hash, token: Hash) -> Hash:
    """The hash of a phrase, from its first token and the hash of those after it; 0 for none."""
    state = ((state ^ token) * 0x01000193) & MASK
    return state ^ (state >> 15)


def check_bits(state: int) -> int:
    """The other hash, in 32 bits."""
    return (state * 0x9E3779B1) & MASK


class Phrases:
    """The table in ``data`` of a model with so many tokens."""

    def __init__(self, data: bytes, vocab: int) -> None:
        self.data = data
        self.vocab = vocab
        self._bits = vocab.bit_length()
        self._entries = memoryview(data).cast("I")

    @classmethod
    def read(cls, file: Path, vocab: int) -> Self:
        """The table in a file. Raises BundleError."""
        data = read_bounded(file, 4 << LARGEST)
        is_power_of_two = len(data) & (len(data) - 1) == 0
        if len(data) < 4 or not is_power_of_two:
            raise BundleError(
                f"{file}: {len(data)} bytes are no table of phrases, which has 4, 8, 16, .."
            )
        return cls(data, vocab)

    def after(self, text: Sequence[int]) -> int | None:
        """The token that mostly follows the longest phrase at the end of a text."""
        state = 0
        found = None
        bits = self._bits
        for length in range(1, min(MOST, len(text)) + 1):
            state = mixed(state, text[-length])
            if length < FEWEST:
                continue
            entry = self._entries[state & (len(self._entries) - 1)]
            token = (entry & ((1 << bits) - 1)) - 1
            if 0 <= token < self.vocab and entry >> bits == check_bits(state) >> bits:
                found = token
        return found
