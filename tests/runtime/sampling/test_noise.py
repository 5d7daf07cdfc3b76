"""The noise of sampling against scalar code, and its distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.runtime.sampling.noise import GROUP, gumbel, philox, sample_all

LOW = 0xFFFFFFFF


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """One counter in plain integers, as in the paper's figure."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p = 0xD2511F53 * a
        q = 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k, q & LOW, (p >> 32) ^ d ^ m, p & LOW
        k, m = (k + 0x9E3779B9) & LOW, (m + 0xBB67AE85) & LOW
    return a, b, c, d


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((LOW, LOW, LOW, LOW), (LOW, LOW), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Those that the authors publish."""
    assert philox_by_hand(counter, key) == words


@given(st.integers(0, LOW), st.integers(0, LOW), st.integers(0, 1), st.integers(0, 2**64 - 1))
def test_philox(number: int, position: int, kind: int, seed: int) -> None:
    words = philox(np.array([number], np.uint64), np.array([position], np.uint64), kind, seed)
    assert tuple(int(word[0]) for word in words) == philox_by_hand(
        (number, position, kind, 0), (seed & LOW, seed >> 32)
    )


def noise_by_hand(seed: int, position: int, token: int) -> float:
    def exponential(word: int, other: int) -> float:
        return -math.log(((word << 20 | other >> 12) + 0.5) / 2**52)

    key = seed & LOW, seed >> 32
    first = philox_by_hand((token // GROUP, position, 0, 0), key)
    smallest = exponential(first[0], first[1]) / GROUP
    if first[2] % GROUP == token % GROUP:
        return -math.log(smallest)
    own = philox_by_hand((token >> 1, position, 1, 0), key)
    return -math.log(smallest + exponential(*own[2 * (token & 1) : 2 * (token & 1) + 2]))


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 1 << 20),
    st.lists(st.integers(0, 999), min_size=1, unique=True),
)
def test_noise_is_a_function_of_seed_position_and_token(
    seed: int, position: int, tokens: list[int]
) -> None:
    ids = np.array(sorted(tokens))
    found = gumbel(seed, position, ids, 1000)
    assert found == pytest.approx([noise_by_hand(seed, position, int(i)) for i in ids], abs=1e-12)


@given(st.integers(1, 1200), st.floats(0.1, 30), st.integers(0, 100))
def test_the_best_of_all_tokens_is_found_without_computing_them(
    vocab: int, spread: float, position: int
) -> None:
    logits = (np.random.default_rng(position).normal(size=vocab) * spread).astype(np.float32)
    for temperature in (0.3, 1.0, 2.5):
        scores = (logits / np.float32(temperature)).astype(np.float64)
        best = int(np.argmax(scores + gumbel(5, position, np.arange(vocab), vocab)))
        assert sample_all(logits, int(np.argmax(logits)), temperature, 5, position) == best


def test_a_token_that_must_not_be_chosen_is_not() -> None:
    scores = np.full(700, -np.inf, np.float32)
    scores[[3, 650]] = 0, -20
    assert {sample_all(scores, 3, 1.0, 1, position) for position in range(300)} == {3}


def test_numbers_are_those_of_a_gumbel_distribution() -> None:
    """Mean, variance and every tenth of the distribution, over 200,000 numbers; and tokens do not
    agree.
    """
    found = np.stack([gumbel(9, position, np.arange(2000), 2000) for position in range(100)])
    assert found.mean() == pytest.approx(0.5772, abs=0.01)
    assert found.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    for tenth in range(1, 10):
        assert np.mean(found < -math.log(-math.log(tenth / 10))) == pytest.approx(
            tenth / 10, abs=0.005
        )
    between = np.corrcoef(found[:, :40].T) - np.eye(40)
    assert np.max(np.abs(between)) < 0.45  # 100 samples a pair
    assert abs(np.mean(between)) < 0.01
