"""The choice of tokens in the kernels' library against that in NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.options import Sampling
from tests.compiled_kernels import COMPILER, NO_COMPILER, built

pytestmark = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)


def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(built("native")))


def both(asked: dict[str, Any], prompt: list[int], vocab: int) -> tuple[Chooser, Chooser]:
    sampling = Sampling(**asked)
    return Chooser(sampling, prompt, [0], vocab), Chooser(
        sampling, prompt, [0], vocab, library=library()
    )


@given(
    st.integers(0, 10_000),
    st.sampled_from((1, 7, 256, 300, 5000, 49_152)),
    st.floats(0.2, 6),
    st.sampled_from((0.0, 0.3, 1.0, 2.5)),
)
def test_tokens_and_likeliest_tokens_are_the_same(
    seed: int, vocab: int, spread: float, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(4, vocab)) * spread).astype(np.float32)
    logits[:, rng.integers(0, vocab, vocab // 3)] = -np.inf
    logits[:, rng.integers(0, vocab)] = spread  # one is possible
    asked = {
        "temperature": temperature,
        "seed": seed,
        "logprobs": int(rng.choice([0, 1, 5, 300])),
        "top_k": int(rng.choice([0, 0, 1, 50, 5000])),
        "top_p": float(rng.choice([1, 1, 0.2, 0.9, 0.999])),
        "min_p": float(rng.choice([0, 0, 0.05, 0.5])),
        "typical_p": float(rng.choice([1, 1, 0.3, 0.95])),
        "repetition_penalty": float(rng.choice([1, 1.3])),
    }
    plain, compiled = both(asked, rng.integers(0, vocab, 3).tolist(), vocab)
    for row in logits:
        assert compiled(row) == plain(row), asked
    for found, expected in zip(compiled.logprobs, plain.logprobs, strict=True):
        assert found.ids == expected.ids
        assert found.chosen == pytest.approx(expected.chosen, abs=2e-5)
        assert found.values == pytest.approx(expected.values, abs=2e-5)


def test_log_probabilities_are_those_of_float64() -> None:
    logits = (np.random.default_rng(3).normal(size=49_152) * 4).astype(np.float32)
    _, compiled = both({"temperature": 0.7, "logprobs": 2}, [1], len(logits))
    token = compiled(logits)
    exact = logits[token] - np.log(np.sum(np.exp(logits.astype(np.float64))))
    assert compiled.logprobs[0].chosen == pytest.approx(exact, abs=2e-6)


def test_errors_are_the_same() -> None:
    for wrong in (np.nan, np.inf):
        for at in (0, 299):
            row = np.zeros(300, np.float32)
            row[at] = wrong
            for chooser in both({"temperature": 1.0}, [1], 300):
                with pytest.raises(BundleError, match="not numbers"):
                    chooser(row)
    for asked in ({"logprobs": 2}, {"logprobs": 2, "temperature": 1.0}):
        for wrong in (np.nan, np.inf):  # of a token that cannot be chosen
            row = np.zeros(300, np.float32)
            row[7] = wrong
            for chooser in both({**asked, "suppress": (7,)}, [1], 300):
                with pytest.raises(BundleError, match="not numbers"):
                    chooser(row)
    for chooser in both({"suppress": tuple(range(300))}, [1], 300):
        with pytest.raises(InputError, match="forbids every token"):
            chooser(np.zeros(300, np.float32))
